"""Examine a transformers class with small configs: which keys decide the shapes of its tensors."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from math import gcd, prod
from typing import Any

import torch
from torch import nn

from growkit.base.errors import InputError, foreign
from growkit.base.names import NOTHING
from growkit.base.tensors import Config
from growkit.engine.long_text_settings import lowered
from growkit.engine.transformers_class import parsed, quiet
from growkit.engine.transformers_internals import causal_class, ignored_names, uninitialised
from growkit.engine.user_family import NAMED
from growkit.extras.described_families.descriptions import ALSO
from growkit.extras.family_inference.small_model import random_weights, sample_logits, smaller
from growkit.model.families.config_keys import EXPERTS, KV_HEADS, LAYERS, WIDTH, last_part
from growkit.model.families.family import Layer, rearranged
from growkit.model.families.family_parts import MAX_LAYERS, leaves, one_model, with_value

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors by their names."""

MAX_PARAMETERS = 1 << 21, 1 << 23
"""Limits for the parameters of a small model: usually, and if the class has none as small."""

INV_FREQ = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
"""Suffixes of buffers that any class recomputes."""

LARGEST_FACTOR = 8
"""Largest ratio of an MLP's width to hidden that a class may have as a default."""

PER_LAYER = "per_layer_config"
"""The key under which transformers keeps the settings of single layers, by their numbers."""

LOADING_KEYS = "architectures", "auto_map"
"""Keys that name classes."""

DESCRIBE = "describe its family as docs/tutorial/adding-a-family.md says"

USUAL = {"experts": EXPERTS, "kv_heads": KV_HEADS, "ffn": WIDTH}
"""Axes of keys with such names, for classes that lack the common ones."""


def not_inferred(problem: str) -> InputError:
    """The error for a class that cannot be inferred."""
    return InputError(f"{problem}; {DESCRIBE}")


class ModelClass:
    """The class of a model, and the keys of its config that are sizes.

    Attributes:
        name: of the class.
        class_prefixes: of the layers' names in the class, such as ``model.layers.``.
        layers: number of layers of the model.
        cache_keys: other keys by which the class counts the layers of a cache, such as
            ``encoder_layers`` of a decoder.
        sizes: keys of the config by axis; several keys of one axis must be equal.
        ratio: a key that is the product of some keys divided by another; None without one.
        times: how many times a key has its axis, if the class takes a part of its value.
        rounded: widths that the class rounds, and why they cannot grow.
        width: a key for the width of an MLP that the config leaves out, and the factor by which the
            class multiplies hidden instead; None without one.
        divided: whether the class needs hidden to be a multiple of heads.
        repeated: tensors that files leave out since they are tied, except the head's weight; each
            with the name of the one in files.
        recomputed: suffixes of tensors that old checkpoints store and the class recomputes.
        derived: whether the class computes the size of a head from hidden and heads; hidden is then
            as wide as all heads together.
        small: size of every axis in the small models.
        shapes_here: the shapes of the model itself.
        resolved: the config as the class resolves it.

    Raises:
        InputError: transformers has no such class, or it is made of several models.
    """

    def __init__(self, config: Config, where: str) -> None:
        kind = config.get("model_type")
        with quiet(), foreign(f"transformers does not understand {where}", "correct it"):
            read = parsed(config, where)
        cls = causal_class(read)
        if cls is None:
            raise InputError(
                f"transformers has no language model of model_type {kind!r} in {where}, so there "
                "is no class to be asked; nothing can be proved of it either"
            )
        if type(read.get_text_config(decoder=True)) is not type(read):
            raise not_inferred(
                f"the model of {where} holds others ({', '.join(read.sub_configs)}), and only "
                "models of a single config can be inferred"
            )
        self._read, self._where = read, where
        self.name = str(getattr(cls, "__name__", kind))
        self._keys = {axis: read.attribute_map.get(key, key) for key, axis in NAMED.items()}
        self.resolved = {
            key: value for key, value in read.to_dict().items() if key not in LOADING_KEYS
        }
        self._plain: dict[str, Any] = {
            key: value for key, value in _decoded(config).items() if key not in LOADING_KEYS
        }
        self._built: dict[str, Shapes | None] = {}
        self.indices: set[str] = set()
        self._by_config: dict[str, Shapes] = {}
        self.divided = self.derived = False
        self.ratio: tuple[str, tuple[str, ...], str] | None = None
        self.width: tuple[str, int] | None = None
        self.sizes: dict[str, tuple[str, ...]] = {}
        self.times: dict[str, int] = {}
        self.rounded: dict[str, str] = {}
        self.small: dict[str, int] = {}
        self._find_layers()
        self._make_small()
        self.cache_keys = self._find_cache_keys()
        self._find_sizes()

    # Values of the config.

    def value(self, key: str) -> Any:
        """The class's value of a key, also if the config leaves it out."""
        if key in self.resolved:
            return self.resolved[key]
        return getattr(self._read, key, None)

    def said(self, key: str) -> Any:
        """The config's value of a key; None if it has none."""
        return self._plain.get(key)

    @property
    def numbers(self) -> dict[str, int]:
        """Keys with a whole number, and the class's values of them."""
        return {key: value for key, value in self.resolved.items() if type(value) is int}

    @cached_property
    def lists(self) -> dict[str, Sequence[Any]]:
        """Keys with one entry per layer, and the class's values of them."""
        return {
            key: value
            for key, value in self.resolved.items()
            if isinstance(value, list | tuple)
            and len(value) == self.layers
            and key not in self.listed
            and (self._every_list or "layer" in key or all(isinstance(e, str) for e in value))
        }

    @cached_property
    def listed(self) -> dict[str, list[int]]:
        """Keys that list the numbers of some layers, and the class's values of them.

        In a short model, [0, 1] may also be a list with one entry per layer. In a deeper model,
        the entries of such a list repeat.
        """
        more = self.layers + 3
        numbers = {
            key: [*value]
            for key, value in self.resolved.items()
            if isinstance(value, list | tuple)
            and all(type(layer) is int and 0 <= layer < self.layers for layer in value)
            and len({*value}) == len(value)
        }
        with suppress(Exception), quiet():
            plain = {k: v for k, v in self._base.items() if not isinstance(v, list)}
            deeper = type(self._read).from_dict(plain | {self.layers_key: more}).to_dict()
            for key in [*numbers]:
                values = deeper.get(key) or []
                if len(values) == more and len({*values}) < more:
                    del numbers[key]
        return numbers

    # Small models.

    def config(self, changes: Mapping[str, Any], layers: int | None = None) -> Any:
        """Make the config of a model with other values of some keys.

        Args:
            changes: values of keys; a dot leads into a part of the config.
            layers: number of layers; None for that of the small models.

        Raises:
            Exception: any exception of the class.
        """
        plain = deepcopy(self._base)
        count = layers or self.small_layers
        plain |= dict.fromkeys((self.layers_key, *self.cache_keys), count)
        for key in self.lists.keys() & {*plain, *changes}:
            plain[key] = ([*changes.get(key, plain.get(key))] * count)[:count]
        if single := self._plain.get(PER_LAYER):
            repeated = [Layer(at % self.layers) for at in range(count)]
            plain |= rearranged({PER_LAYER: single}, repeated, self.layers)
        for key, value in changes.items():
            if key not in self.lists:  # set above
                plain = with_value(plain, key, value)
        return type(self._read).from_dict(plain)

    def changes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The values of all keys of the axes with these sizes."""
        if self.derived and "head_dim" in sizes:
            sizes = {**sizes, "hidden": sizes["heads"] * sizes["head_dim"]}
        values = {
            key: sizes[axis] * self.times.get(key, 1)
            for axis, keys in self.sizes.items()
            if axis in sizes
            for key in keys
        }
        if self.ratio:
            key, over, under = self.ratio
            now = dict(self._numbers()) | values
            values[key], rest = divmod(prod(now[factor] for factor in over), now[under])
            if rest:
                values[key] = -1  # there is no such model
        return values

    def shapes(self, changes: Mapping[str, Any], layers: int | None = None) -> Shapes | None:
        """Name and shape of every tensor in the files of a model; None if there is no such model.

        Args:
            changes: see ``config``.
            layers: see ``config``.
        """
        asked = json.dumps([dict(changes), layers], sort_keys=True, default=str)
        if asked not in self._built:
            self._built[asked] = None
            with suppress(Exception), quiet():  # of a class that cannot have these sizes
                config = self.config(changes, layers)
                same = repr(config.to_dict())
                if same not in self._by_config:
                    self._by_config[same] = self._stored(self.model(config, "meta"))
                self._built[asked] = self._by_config[same]
        return self._built[asked]

    def _stored(self, model: nn.Module) -> Shapes:
        stored = as_in_files(model, model.state_dict()).items()
        self.indices |= {name for name, tensor in stored if not tensor.is_floating_point()}
        return {name: tuple(tensor.shape) for name, tensor in stored if name not in self.repeated}

    def shapes_of(self, sizes: Mapping[str, int]) -> Shapes | None:
        """See ``shapes``, for the sizes of axes, and the number of layers."""
        return self.shapes(self.changes(sizes), sizes.get("layers"))

    def model(self, config: Any, device: str) -> nn.Module:
        """A model of the class, without weights of its own."""
        from transformers import AutoModelForCausalLM

        with quiet(), torch.device(device), uninitialised():
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,  # norms of the config's dtype may refuse what they are given
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=False,
            )
            model.tie_weights()
        assert isinstance(model, nn.Module)
        return model.eval()

    def small_model(self, changes: Mapping[str, Any] = NOTHING) -> nn.Module:
        """A small model on the CPU, with random weights that are large enough to matter.

        Args:
            changes: see ``config``.
        """
        with quiet():
            config = self.config(changes)
        return random_weights(self.model(config, "cpu"))

    # What the class depends on.

    def _find_layers(self) -> None:
        """Find the layers, and the names and kinds of their tensors."""
        self._base = dict(self._plain)
        self.cache_keys = []
        self.repeated: Mapping[str, str] = {}
        self._every_list = False
        named = self._keys["layers"]
        count = self.value(named)
        if isinstance(count, int) and not 0 < count <= MAX_LAYERS:
            raise InputError(
                f"{self._where} has {named} {count!r}; a whole number up to {MAX_LAYERS:,} was "
                "expected, correct it"
            )
        with quiet(), foreign(f"{self.name} takes no config like {self._where}", DESCRIBE):
            model: Any = self.model(type(self._read).from_dict(deepcopy(self._plain)), "meta")
        lists = _lists(model)
        others = [key for key in self.numbers if LAYERS.search(key) and key != named]
        keys = [*([named] if isinstance(count, int) else []), *others]
        self.recomputed = _recomputed(model)
        longer = next(
            (lengthened for key in keys if (lengthened := self._longer(key, lists))), None
        )
        if longer is None:
            raise not_inferred(
                f"no single key of the config of {self.name} adds a layer to a list of them"
            )
        self._name_stored(model, longer)
        self._find_small_layers()

    def _name_stored(self, model: Any, lists: Sequence[str]) -> None:
        """Note the names and shapes of stored tensors, and the prefixes of those of layers."""
        names = {module: name for name, module in model.named_modules()}
        head = f"{names.get(model.get_output_embeddings())}.weight"
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self.repeated = {name: of for name, of in tied.items() if name != head}
        self.shapes_here = shapes = self._stored(model)
        self.class_prefixes = tuple(f"{name}." for name in lists)
        self._prefixes = tuple(
            prefix
            for class_prefix in self.class_prefixes
            for prefix in _stored_prefixes(model, {*shapes, *self.repeated}, class_prefix)
        )
        self._templates: dict[str, str] = {}

    def _find_small_layers(self) -> None:
        """Find the smallest number of layers that has all kinds, twice if possible."""
        shapes = self.shapes_here
        signature = self._signature(shapes)
        first: dict[str, int] = {}
        for name in shapes:
            layer = self.layer_of(name)
            if layer is not None:
                first[self.template(name)] = min(layer, first.get(self.template(name), layer))
        last = max(first.values(), default=0) + 1
        every = Counter(self._kinds(shapes, self.layers))
        for few in range(max(2, last), self.layers):
            fewer = self.shapes({}, few)
            if fewer is None or self._signature(fewer) != signature:
                continue
            kinds = Counter(self._kinds(fewer, few))
            if all(kinds[kind] >= min(2, count) for kind, count in every.items()):
                self.small_layers = few
                return

    def _longer(self, key: str, lists: Mapping[str, int]) -> list[str]:
        """The lists of modules that get longer with a key, which is then the number of layers."""
        count = self.value(key)
        self.layers_key, self.layers, self.small_layers = key, count, count
        for more, self._every_list in product((1, count), (False, True)):
            # Some classes need whole periods, or have lists per layer under unusual names.
            for cached in ("listed", "lists"):
                self.__dict__.pop(cached, None)
            with suppress(Exception), quiet():
                deeper = _lists(self.model(self.config({}, count + more), "meta"))
                return [name for name, size in lists.items() if deeper.get(name, 0) > size]
        return []

    def template(self, name: str) -> str:
        """The name of a tensor with ``{layer}`` and ``{expert}`` in place of numbers."""
        if name not in self._templates:  # there may be 100,000 of them
            template = name
            for prefix in self._prefixes:
                if name.startswith(prefix):
                    template = prefix + re.sub(
                        r"^\d+(?=\.|$)", "{layer}", name.removeprefix(prefix)
                    )
            self._templates[name] = one_of_experts(template)
        return self._templates[name]

    def layer_of(self, name: str) -> int | None:
        """The layer of a tensor; None outside of the layers."""
        before, placeholder, _ = self.template(name).partition("{layer}")
        return int(name.removeprefix(before).partition(".")[0]) if placeholder else None

    def _kinds(self, shapes: Shapes, layers: int) -> list[Any]:
        """The kind of every layer: its tensors, and its entries in lists of names."""
        lists = [
            entries for entries in self.lists.values() if all(isinstance(e, str) for e in entries)
        ]
        tensors: list[set[Any]] = [set() for _ in range(layers)]
        for name, shape in shapes.items():
            if (layer := self.layer_of(name)) is not None and layer < layers:
                tensors[layer].add((self.template(name), shape))
        return [
            (frozenset(in_layer), *(values[layer] for values in lists))
            for layer, in_layer in enumerate(tensors)
        ]

    def _signature(self, shapes: Shapes) -> set[tuple[str, tuple[int, ...]]]:
        """The kinds of tensors; shapes outside layers are left out, as they may vary with depth."""
        return {
            (self.template(name), () if self.layer_of(name) is None else shape)
            for name, shape in shapes.items()
        }

    def _make_small(self) -> None:
        """Divide the sizes of a large model until a random model of the class is small and runs."""
        named = {axis: key for axis, key in self._keys.items() if self._counts(key)}
        named |= {
            axis: key for key, axis in ALSO.items() if axis not in named and self._counts(key)
        }
        sizes = [*smaller(named, [*self._numbers()], self.lists, self.resolved)]
        for limit in MAX_PARAMETERS:
            for changes in ({}, *sizes):
                if self._fits(changes, limit):
                    for key, value in changes.items():
                        self._set(key, value)
                    self._lower_thresholds()
                    return
        raise not_inferred(
            f"no small {self.name} model like that of {self._where} could be made to run"
        )

    def _lower_thresholds(self) -> None:
        """Let few tokens exceed windows, and the numbers of tokens that layers choose."""
        with quiet():
            low = lowered(self.config({}).to_dict())
        if self._runs(low):
            for key, value in low.items():
                self._set(key, value)

    def _find_cache_keys(self) -> list[str]:
        """Find keys that no layer needs, but without which a cache has too few of them."""
        count = max(2, self.small_layers)

        def runs(key: str, value: int, cache: bool = False) -> bool:
            with suppress(Exception), quiet():
                sample_logits(self.model(self.config({key: value}, count), "cpu"), cache)
                return True
            return False

        keys = (key for key in self.numbers if LAYERS.search(key) and key != self.layers_key)
        return [
            key
            for key in keys
            if not runs(key, 1, cache=True) and runs(key, 1) and runs(key, count, cache=True)
        ]

    def _set(self, key: str, value: Any) -> None:
        self._base, self._built = with_value(self._base, key, value), {}

    def _fits(self, changes: Mapping[str, Any], max_numbers: int) -> bool:
        """Whether there is a model with these changes that is small and runs."""
        with suppress(Exception), quiet():
            model = self.model(self.config(changes), "meta")
            small = sum(parameter.numel() for parameter in model.parameters()) <= max_numbers
            # Some classes cannot save all sizes that they can compute with, and a tensor without
            # numbers shows no axis.
            shapes = self.shapes(changes) if small else None
            return shapes is not None and all(map(prod, shapes.values())) and self._runs(changes)
        return False

    def _runs(self, changes: Mapping[str, Any]) -> bool:
        """Whether there is a model with these changes, and it runs."""
        with suppress(Exception):  # a class may raise anything for sizes that it does not support
            sample_logits(self.small_model(changes))
            return True
        return False

    def _counts(self, key: str) -> bool:
        value = self.value(key)
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    def _numbers(self) -> Iterator[tuple[str, int]]:
        """Every whole number of the config that may be a size; common sizes come first."""
        with quiet():
            values = dict(leaves(self.config({}).to_dict()))
        first = [key for key in (*self._keys.values(), *ALSO) if key in values]
        for key in dict.fromkeys([*first, *values]):
            value = values[key]
            if key.endswith("_token_id") or key == self.layers_key or value < 1:
                continue
            yield key, value

    def _find_sizes(self) -> None:
        """Find the keys that change a shape, alone or together with others."""
        self._divide_by_heads()
        self._state_head_dim()
        self._state_width()
        self._find_reduced()
        stated = {axis for axis, key in self._keys.items() if self._counts(key)}
        self._axis_of = {key: axis for axis, key in self._keys.items()} | {
            key: axis for key, axis in ALSO.items() if axis not in stated
        }
        self._values = numbers = dict(self._numbers())
        here = self.shapes({})
        assert here is not None
        self._here, stuck = here, []
        for key in (key for key in numbers if key not in self.rounded):
            doubled = self._doubled(key)
            if doubled is None:
                stuck.append(key)
            elif any(doubled[name] != here[name] for name in doubled.keys() & here.keys()):
                self._add((key,), numbers[key])
        if self._keys["heads"] in numbers and not self._has_heads_apart():
            self._find_derived()
        for key in stuck:
            if not any(key in keys for keys in self.sizes.values()):
                self._find_partners(key, stuck)
        self._find_ratio(stuck)
        self._keep_tables()
        self._add_named()
        for axis in ("vocab", "hidden"):
            if axis not in self.small:
                raise not_inferred(
                    f"the config of {one_model(self.name)} has no key that changes {axis} alone"
                )

    def _add_named(self) -> None:
        """Add sizes that change no shape."""
        numbers, kv_heads = self._values, self._keys["kv_heads"]
        if "kv_heads" not in self.small and numbers.get(kv_heads) == self.small.get("heads", 0):
            self.sizes["heads"] += (kv_heads,)  # every head has its own keys, from a latent
        width = self._keys["ffn"]
        if width in numbers and not any(width in keys for keys in self.sizes.values()):
            self.sizes[width] = (width,)  # of a kind of layers that the model lacks

    def _keep_tables(self) -> None:
        """Give experts that the class looks up in a table an axis that does not grow."""
        if "experts" not in self.sizes:
            return
        here = self._here
        doubled = self.shapes_of({"experts": 2 * self.small["experts"]}) or here
        modules = self.model(self.config({}), "meta").named_modules()
        tables = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)]
        if any(doubled.get(name) != here.get(name) for name in tables):
            keys, size = self.sizes.pop("experts"), self.small.pop("experts")
            self.sizes[keys[0]], self.small[keys[0]] = keys, size

    def _state_head_dim(self) -> None:
        """Add the size of a head to the config, if the class reads it and the config has none."""
        numbers = dict(self._numbers())
        hidden, heads = (numbers.get(self._keys[axis], 0) for axis in ("hidden", "heads"))
        if self._keys["head_dim"] in numbers or not heads or not hidden // heads:
            return
        head_dim = hidden // heads
        here, twice = self.shapes({"head_dim": head_dim}), self.shapes({"head_dim": 2 * head_dim})
        if here == self.shapes({}) != twice:
            self._set("head_dim", head_dim)

    def _state_width(self) -> None:
        """Add the width of an MLP to the config, if the class otherwise derives it from hidden."""
        hidden = dict(self._numbers()).get(self._keys["hidden"], 0)
        for key, value in self.resolved.items():
            if value is not None or not WIDTH.search(key) or not hidden:
                continue
            here, other = self.shapes({}), self.shapes({key: LARGEST_FACTOR * hidden + 1})
            for factor in range(1, LARGEST_FACTOR + 1) if other not in (None, here) else ():
                if self.shapes({key: factor * hidden}) == here:
                    self.width = key, factor
                    self._set(key, factor * hidden)
                    return

    def _find_reduced(self) -> None:
        """Find widths of which the class takes a part, such as two thirds, in ``times``.

        If the class rounds that part, only widths are found where this makes no difference.
        """
        for key, width in self._numbers():
            small = self._scaled({key: width}, key)
            normal = small and all(size % width == 0 for size in small)
            if normal or not WIDTH.search(key) or key not in self.numbers:
                continue
            full_width = self.numbers[key]
            sizes = self._scaled({key: full_width}, key)
            if not sizes or len(sizes) > 1 or sizes != self._scaled({key: full_width}, key, 3):
                continue
            times = full_width // gcd(full_width, *sizes)
            for value in (times << power for power in range(3, full_width.bit_length())):
                part = {value * size // full_width for size in sizes}
                others = ({name: 2 * size} for name, size in self._numbers() if name != key)
                alike = (self._scaled({**other, key: value}, key) for other in ({}, *others))
                if all(scaled in (None, part) for scaled in alike) and self._runs({key: value}):
                    self._set(key, value)
                    self.times[key] = times
                    break
        for key in self.numbers.keys() - self.times.keys():
            if WIDTH.search(key):
                self._find_rounded(key)

    def _find_rounded(self, key: str) -> None:
        """Find whether the class rounds a width, and a value that gives it the same one exactly."""
        multiples = {name: of for name, of in self.numbers.items() if "multiple" in name}
        # So large that rounding it shows in no ratio, and divisible by common multiples.
        width, far = self.numbers[key], 15 << 20
        here, there, twice = (
            self.shapes({**multiples, key: value}) or {} for value in (width, far, 2 * far)
        )
        sizes = {
            (size, large)
            for name in here.keys() & there.keys() & twice.keys()
            for size, large, larger in zip(here[name], there[name], twice[name], strict=True)
            if larger == 2 * large
        }
        exact = {Fraction(size * far, large) for size, large in sizes}
        if not exact or exact == {width}:
            return
        rounded, equal = min(size for size, _ in sizes), max(exact)
        self.rounded[key] = (
            f"cannot grow: its class rounds {key} {width:,} to a width of {rounded:,}"
        )
        if equal.denominator == 1 and self.shapes({**multiples, key: int(equal)}) == here:
            self.rounded[key] += (
                f"; replace it in config.json, whatever its name there, by {equal}, which gives "
                "the same width"
            )

    def _scaled(self, changes: Mapping[str, int], key: str, factor: int = 2) -> set[int] | None:
        """The dimensions of which another value of a key makes a multiple; None if that differs."""
        here, scaled = self.shapes(changes), self.shapes({**changes, key: factor * changes[key]})
        if here is None or scaled is None or here.keys() != scaled.keys():
            return None
        pairs = {
            (size, other)
            for name in here
            for size, other in zip(here[name], scaled[name], strict=True)
            if size != other
        }
        right = all(other == factor * size for size, other in pairs)
        return {size for size, _ in pairs} if right else None

    def _divide_by_heads(self) -> None:
        """Check whether hidden must be a multiple of heads; if so, make heads twice as wide."""
        numbers, (wide, many) = dict(self._numbers()), map(self._keys.get, ("hidden", "heads"))
        hidden, heads = numbers.get(wide or "", 0), numbers.get(many or "", 0)
        if not (wide and many and heads) or hidden % heads:
            return
        factor = next(prime for prime in (2, 3, 5, 7) if hidden % (prime * heads))
        grown = {many: factor * heads}
        wider = grown | {wide: factor * hidden}
        self.divided = self.shapes(grown) is None and self.shapes(wider) is not None
        if self.divided and factor == 2 and self._runs({wide: 2 * hidden}):
            self._set(wide, 2 * hidden)

    def _doubled(self, *keys: str) -> Shapes | None:
        """The shapes with these keys doubled; None if there are none, or other tensors."""
        shapes = self.shapes({key: 2 * self._values[key] for key in keys})
        if shapes is None or {*map(self.template, shapes)} != {*map(self.template, self._here)}:
            return None
        return shapes

    def _find_partners(self, key: str, stuck: Sequence[str]) -> None:
        """Find the keys that must change together with one."""
        numbers = self._values
        others = sorted(
            (other for other in stuck if other != key),
            key=lambda other: numbers[other] != numbers[key],
        )
        groups: list[tuple[str, ...]] = [(other,) for other in others]
        groups += [*combinations(others[:6], 2)] if key in self._axis_of else []
        for group in groups:
            if self._doubled(key, *group) not in (None, self._here):
                self._join((key, *group))
                return

    def _has_heads_apart(self) -> bool:
        """Whether heads have a size of their own, so that hidden can grow without them."""
        if "head_dim" not in self.small:
            return False
        wide = dict.fromkeys(self.sizes.get("hidden", ()), 2 * self.small.get("hidden", 0))
        return not wide or self._runs(wide)

    def _add(self, keys: tuple[str, ...], size: int, *, unnamed: bool = False) -> None:
        """Add an axis of some keys; one that is unnamed has no common name."""
        axis = None if unnamed else self._axis_of.get(keys[0])
        if axis is None or axis in self.small:
            fitting = (axis for axis, name in USUAL.items() if name.search(last_part(keys[0])))
            axis = next(
                (axis for axis in fitting if axis not in self.small), re.sub(r"\W", "_", keys[0])
            )
        self.sizes[axis], self.small[axis] = keys, size // self.times.get(keys[0], 1)

    def _join(self, keys: tuple[str, ...]) -> None:
        """Make several keys that only change together one axis, if they are equal."""
        numbers = self._values
        known = [axis for axis, of in self.sizes.items() if {*of} & {*keys}]
        same = [key for key in keys if numbers[key] == numbers[keys[0]]]
        if known or len(same) != len(keys):
            for axis in known:
                if all(numbers[key] == self.small[axis] for key in keys):
                    self.sizes[axis] = tuple(dict.fromkeys([*self.sizes[axis], *keys]))
            return
        named_first = sorted(keys, key=lambda key: key not in self._axis_of)
        self._add(tuple(named_first), numbers[keys[0]])

    def _find_ratio(self, stuck: list[str]) -> None:
        """Find an integer that must be a ratio of sizes, such as ``expand``."""
        numbers = self._values
        rest = [key for key in stuck if not any(key in keys for keys in self.sizes.values())]
        for ratio in (key for key in rest if "expand" in key):
            value = numbers[ratio]
            over = [
                key
                for key in rest
                if key != ratio
                and self.shapes({key: 2 * numbers[key], ratio: 2 * value}) is not None
            ]
            if not over:
                continue
            sizes = dict(numbers)
            if value % 2:  # it can be halved only once it is doubled
                for key in (ratio, over[0]):
                    sizes[key] = 2 * numbers[key]
            under = [
                key
                for key in rest
                if key not in over
                and self.shapes(
                    {over[0]: sizes[over[0]], key: 2 * numbers[key], ratio: sizes[ratio] // 2}
                )
                is not None
            ]
            if len(under) == 1:
                self.ratio = ratio, tuple(over), under[0]
                for key in (ratio, *under, *over):
                    self._set(key, sizes[key])
                    if key != ratio:
                        self._add((key,), sizes[key])
                return

    def _find_derived(self) -> None:
        """Check whether the class computes the size of a head from hidden and heads."""
        numbers, here = self._values, self._here
        hidden, heads = (self._keys[axis] for axis in ("hidden", "heads"))
        doubled = self.shapes({heads: 2 * numbers[heads]}) or here
        narrower = any(
            a < b
            for name in here.keys() & doubled.keys()
            for a, b in zip(doubled[name], here[name], strict=True)
        )
        if "heads" in self.small and "head_dim" not in self.small and not narrower:
            return
        if hidden not in numbers or numbers[hidden] % numbers[heads]:
            return
        same = [key for key in numbers if "head" in key and numbers[key] == numbers[heads]]
        as_it_is = sample_logits(self.small_model())
        # No shape shows which of these keys the class uses, if any.
        used = [key for key in same if not self._computes_alike(key, numbers[key], as_it_is)]
        if not used:
            return
        heads = heads if heads in used else used[0]
        self.derived = True
        if other_keys := self.sizes.pop("head_dim", ()):  # of other heads
            size = self.small.pop("head_dim")
            self._add(other_keys, size, unnamed=True)
        self.sizes["heads"] = (heads,)
        self.small |= {"heads": numbers[heads], "head_dim": numbers[hidden] // numbers[heads]}

    def _computes_alike(self, key: str, value: int, expected: torch.Tensor) -> bool:
        with suppress(Exception):
            return torch.equal(sample_logits(self.small_model({key: 2 * value})), expected)
        return False


def _lists(model: nn.Module) -> dict[str, int]:
    """The outermost lists of modules, and their lengths."""
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    return {n: size for n, size in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}


def _recomputed(model: Any) -> list[str]:
    """Suffixes of buffers that the class does not save, and of names that its loader ignores."""
    kept = {*model.state_dict()}
    names = [name for name, _ in model.named_buffers() if name not in kept]
    names += [name for name in ignored_names(model) if re.fullmatch(r"\w+(\.\w+)+", name)]
    suffixes = {".".join(["", *name.split(".")[-2:]]) for name in names}
    # Older versions of some classes saved the number that they mask with next to the mask.
    suffixes |= {
        re.sub(r"bias$", "masked_bias", name) for name in suffixes if name.endswith(".bias")
    }
    own = sorted(suffixes - {*INV_FREQ})
    return [*INV_FREQ[:1], *own] if own else []


def as_in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model as its class saves them, by their names in files."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


def _stored_prefixes(model: Any, stored: set[str], prefix: str) -> list[str]:
    """The prefixes of the layers' names in files, which may have several lists of layers."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    if own.keys() <= stored:
        return [prefix]
    # One expert of a stack is enough: files may store experts one by one.
    own = {name: tensor[:1] if tensor.dim() > 2 else tensor for name, tensor in own.items()}
    numbered = (re.match(r"(.*?\.)\d+(?:\.|$)", name) for name in as_in_files(model, own))
    return list(dict.fromkeys(match[1] for match in numbered if match)) or [prefix]


def _decoded(value: Any) -> Any:
    """Decode numbers that JSON cannot write, in the notation of transformers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    return value


def one_of_experts(name: str) -> str:
    """The name of a tensor with ``{expert}`` in place of the number of one."""
    return re.sub(r"(experts\.)\d+\.", r"\1{expert}.", name)
