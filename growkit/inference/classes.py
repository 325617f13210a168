"""A class of transformers, examined with small configs: its tensor shapes and their causes."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from growkit.base.errors import InputError, foreign
from growkit.base.tensors import Config
from growkit.engine.oracle import parsed, quiet
from growkit.engine.user_family import ALSO, NAMED, Shapes
from growkit.families.description import MOST_LAYERS

SMALL = {
    "vocab": 61,
    "hidden": 40,
    "ffn": 22,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "positions": 64,
}
"""Sizes of the small models; all their products differ."""

MOST_PARAMETERS = 1 << 24
"""Limit for the elements of a tensor in a small model; a larger one depends on other keys."""

DESCRIBE = "describe its family as docs/adding-a-family.md says"

OTHERS = (6, 10, 14, 18, 26, 34)
"""Values for other counts in a config."""


def not_inferred(problem: str) -> InputError:
    """The error for a class that cannot be inferred."""
    return InputError(f"{problem}; {DESCRIBE}")


class ModelClass:
    """The class of a model, and the keys of its config that are sizes.

    Attributes:
        name: of the class.
        sizes: config keys by axis, except for sizes that the class computes.
        followers: keys that must equal the hidden size.
        derived: whether the class computes the size of a head from hidden and heads.
        square: whether hidden must be as wide as all heads together.
        small: size of every axis in the small models.

    Raises:
        InputError: transformers has no such class, or it is made of several models.
    """

    def __init__(self, config: Config, where: str) -> None:
        from transformers import AutoModelForCausalLM

        kind = config.get("model_type")
        with quiet(), foreign(f"transformers does not understand {where}", "correct it"):
            read = parsed(config, where)
        known = AutoModelForCausalLM._model_mapping
        if type(read) not in known:
            raise InputError(
                f"transformers has no language model of model_type {kind!r} in {where}, so there "
                "is no class to be asked; nothing can be proved of it either"
            )
        if read.sub_configs:
            raise not_inferred(
                f"the model of {where} holds others ({', '.join(read.sub_configs)}), and only "
                "models of a single config can be inferred"
            )
        self._read, self._where = read, where
        self.name = str(getattr(known[type(read)], "__name__", kind))
        self._keys = {axis: read.attribute_map.get(key, key) for key, axis in NAMED.items()}
        self._resolved = {key: value for key, value in read.to_dict().items() if key != "auto_map"}
        self._plain = dict(config)
        self.sizes: dict[str, str] = {}
        self.small: dict[str, int] = {}
        self.derived = self.square = False
        self.followers: set[str] = set()
        self._built: dict[str, Shapes | None] = {}
        self._find_sizes()

    @property
    def layers(self) -> int:
        """Number of layers of the model.

        Raises:
            InputError: more than any model has, or no number at all.
        """
        count = self.value(self._keys["layers"])
        if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
            raise InputError(
                f"{self._where} has {self._keys['layers']} {count!r}; a whole number up to "
                f"{MOST_LAYERS:,} was expected, correct it"
            )
        return count

    @property
    def lists(self) -> list[str]:
        """Keys with one entry per layer, both in the config and in the class's defaults."""
        listed = {
            key
            for key, value in self._plain.items()
            if isinstance(value, list) and len(value) == self.layers
        }
        bare = {key: value for key, value in self._plain.items() if key not in listed}
        with quiet(), foreign(f"{self._where} is not understood", "correct it"):
            few, more = (
                type(self._read).from_dict(bare | {self._keys["layers"]: count}) for count in (2, 3)
            )
        return sorted(
            key for key in listed if [_length(each, key) for each in (few, more)] == [2, 3]
        )

    def value(self, key: str) -> Any:
        """The class's value of a key, also if the config leaves it out."""
        return self._resolved.get(key, getattr(self._read, key, None))

    def said(self, key: str) -> Any:
        """The config's value of a key; None if it has none."""
        return self._plain.get(key)

    @property
    def splits_hidden(self) -> bool:
        """Whether ``head_dim`` defaults to the hidden size divided by the number of heads."""
        if self.derived or self.said("head_dim") is not None:
            return self.derived
        if self.square:
            return True
        sizes = {axis: size for axis, size in self.small.items() if axis != "head_dim"}
        whole = self.small["hidden"] // self.small["heads"]
        return self.shapes(sizes) == self.shapes(sizes | {"head_dim": whole})

    def config(self, sizes: Mapping[str, int], **more: Any) -> Any:
        """Make the config of a model with these sizes, and some other keys.

        Raises:
            Exception: any exception of the class.
        """
        keys = {self.sizes[axis]: size for axis, size in sizes.items() if axis in self.sizes}
        if self.square:
            keys[self.sizes["hidden"]] = sizes["heads"] * sizes["head_dim"]
        keys |= dict.fromkeys(self.followers, keys[self.sizes["hidden"]])
        count = keys[self.sizes["layers"]]
        plain: dict[str, Any] = {}
        for key, value in self._plain.items():
            if isinstance(value, list) and len(value) == self.layers:
                value = (value * count)[:count]
            elif isinstance(value, dict) and any(isinstance(v, list) for v in value.values()):
                continue  # of as many numbers as a head has coordinates
            plain[key] = value
        ends = {
            key: 1  # of the few tokens that there are
            for key, value in self._resolved.items()
            if key.endswith("_token_id") and value is not None
        }
        return type(self._read).from_dict(plain | ends | keys | more)

    def shapes(self, sizes: Mapping[str, int], **more: Any) -> Shapes | None:
        """Name and shape of every tensor of a small model; None if there is no such model."""
        asked = json.dumps([dict(sizes), more], sort_keys=True, default=str)
        if asked not in self._built:
            try:
                with quiet():
                    config = self.config(sizes, **more)
                model = self.model(config, "meta")
                self._built[asked] = {n: tuple(t.shape) for n, t in model.state_dict().items()}
            except Exception:  # of a class that cannot have these sizes
                self._built[asked] = None
        return self._built[asked]

    def model(self, config: Any, device: str) -> nn.Module:
        """A model of the class, without weights of its own."""
        from transformers import AutoModelForCausalLM

        with quiet(), torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
        assert isinstance(model, nn.Module)
        return model.eval()

    def small_model(self) -> nn.Module:
        """A small model on the CPU, each parameter random and of a size that shows."""
        with quiet():
            config = self.config(self.small)
        model = self.model(config, "cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "norm" in name.lower():
                    parameter.copy_(1 + 0.3 * noise)
                elif parameter.dim() < 2:
                    parameter.copy_(0.3 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        return model

    def _find_sizes(self) -> None:
        """Find the keys that change a shape, one after the other.

        Raises:
            InputError: the class is unusual, or has experts.
        """
        self._find_named()
        self.sizes.setdefault("head_dim", "head_dim")  # many classes look for one
        self.small = dict(SMALL)
        if not self._matters("head_dim"):
            del self.sizes["head_dim"]
            self.derived = True
            self._make_square()
        self._find_followers()
        here = self.shapes(self.small)
        if here is None:
            self._explain()
        experts = [name for name in here or {} if ".experts." in name]
        if experts:
            raise not_inferred(
                f"{self.name} has experts ({experts[0]}), and families with experts cannot be "
                "inferred"
            )
        for axis in ("ffn", "kv_heads"):
            if axis in self.sizes and not self._matters(axis):
                del self.sizes[axis]
        if "positions" in self.sizes and not self._matters("positions"):
            # Positions are not a size then; a small model has few of them nevertheless.
            self._plain[self.sizes.pop("positions")] = SMALL["positions"]
        self.small = {a: n for a, n in self.small.items() if a in self.sizes or a == "head_dim"}
        self._find_others()
        if not self.square and not self._runs():
            self._make_square()
        for name, shape in (self.shapes(self.small) or {}).items():
            if prod(shape) > MOST_PARAMETERS:
                raise not_inferred(
                    f"tensor {name} of a {self.name} model is large whatever its sizes are "
                    f"({list(shape)}), so nothing can be tried with a small one"
                )

    def _make_square(self) -> None:
        self.square = True
        self.small["hidden"] = SMALL["heads"] * SMALL["head_dim"]

    def _runs(self) -> bool:
        """Whether a small model runs; a class may accept sizes and still fail."""
        try:
            with torch.no_grad():
                self.small_model()(torch.arange(4)[None], use_cache=False)
        except Exception:  # a class may raise anything for sizes that it cannot have
            return False
        return True

    def _find_named(self) -> None:
        """Find the keys with common names."""
        present = {axis: key for axis, key in self._keys.items() if self.value(key) is not None}
        for key, axis in ALSO.items():
            if axis not in present and isinstance(self.value(key), int):
                present[axis] = key
        missing = {"vocab", "hidden", "layers", "heads"} - present.keys()
        if missing:
            names = sorted(key for key, axis in NAMED.items() if axis in missing)
            raise not_inferred(
                f"the config of a {self.name} model has no key that transformers calls "
                f"{' or '.join(names)}"
            )
        self.sizes = {axis: key for axis, key in present.items() if axis in SMALL}

    def _find_others(self) -> None:
        """Find other counts in the config that a shape depends on."""
        named = {*self._keys.values(), *self.sizes.values(), *self.followers}
        others = iter(OTHERS)
        for key, value in self._resolved.items():
            counts = isinstance(value, int) and not isinstance(value, bool) and value > 1
            if not counts or key in named or key.endswith("_token_id"):
                continue
            if self.shapes(self.small, **{key: 2 * value}) in (None, self.shapes(self.small)):
                continue
            self.sizes[key] = key
            self.small[key] = next(others, value)
            if self.shapes(self.small) is None:
                self.small[key] = value

    def _find_followers(self) -> None:
        """Find keys that must equal hidden, since the class has other tensors otherwise."""
        width = self._resolved.get(self.sizes["hidden"])
        for key, value in self._resolved.items():
            if value != width or isinstance(value, bool) or key == self.sizes["hidden"]:
                continue
            alike, apart = (
                self.shapes(self.small, **{key: n * self.small["hidden"]}) or {} for n in (1, 2)
            )
            if alike.keys() != apart.keys():
                self.followers.add(key)

    def _matters(self, axis: str) -> bool:
        """Whether any shape changes with a size."""
        here = self.shapes(self.small)
        there = self.shapes(self.small | {axis: 2 * self.small[axis]})
        return here is not None and there is not None and here != there

    def _explain(self) -> None:
        """Raise the reason why a small model of the class cannot be built."""
        with foreign(f"{self.name} takes no small config like that in {self._where}", DESCRIBE):
            self.model(self.config(self.small), "meta")
        raise AssertionError("there is a small model after all")


def _length(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return len(value) if isinstance(value, list) else 0
