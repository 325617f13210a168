"""Sizes of a model's axes: from the keys of its config, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import nearest
from growkit.base.parsing import check_kind
from growkit.base.tensors import Config
from growkit.families.description import Multiple

MOST_LAYERS = 10_000
"""Or experts of a layer."""

MOST_EXPERTS = 1 << 15
"""In all layers together: more than the largest models have."""

MOST_SIZE = 1 << 24
"""Of any size in a config: a hundred times that of the largest models there are."""

Axes = tuple[str, ...]


class MultipleError(InputError):
    """A size is no multiple of another, as the model class demands.

    Attributes:
        problem: the sentence without its remedy.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class HasSizes:
    """The configs of a model family.

    Attributes:
        name: for messages and ``growkit inspect``.
        axes: for every config key that is a size, the axes whose sizes add up to it, or a function
            from the config to these axes. An axis that is listed twice is added twice. Axes of
            unknown size that share a key have equal sizes, so keys of single axes come first.
        defaults: what the model class assumes for keys that the config leaves out, as values or as
            functions of the config.
        constants: axes whose size is the same in every model of the family.
        same: axes that always have the size of another one.
        may_be_zero: keys of sizes that may be 0.
        derived: keys of sizes that the class computes from other sizes and ignores in a config.
        ratios: keys of whole numbers that are the size of one axis divided by that of another.
        aliases: for keys of sizes, the other name under which a config may have them.
        former: keys of older configs, and their names today, under which growkit writes them.
        per_layer: keys that hold one number for all layers, or a list with one for each; their
            axes are numbered, ``rank_0`` and so on (``rank_{layer}`` in patterns).
        multiples: sizes that must be multiples of another size.
        choices: the values that keys with a fixed set of values may have.
        check: raises InputError for what else a (completed) config may have wrong.
    """

    name: str
    axes: Mapping[str, Axes | Callable[[Config], Axes]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    may_be_zero: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    per_layer: frozenset[str] = frozenset()
    multiples: tuple[Multiple, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Config], None] = lambda config: None

    def complete(self, config: Config) -> Config:
        """The config with the defaults filled in.

        Raises:
            InputError: a size is missing, is no positive number, or breaks a demand of the class.
        """
        complete = self._filled_in(config)
        sizes = self._solve(complete)
        for key, values in self.choices.items():
            value = complete.get(key)
            if value not in values:
                raise InputError(
                    f"config.json of a {self.name} model has {key} {value!r}; choose one of "
                    f"{', '.join(values)}"
                )
        for key, default in self.defaults.items():
            if type(default) in (bool, int, list):
                what = f"{key} in config.json of a {self.name} model"
                check_kind(complete[key], type(default), what)
        self.check(complete)
        numbers = complete | sizes
        for demand in self.multiples:
            if not numbers.keys() >= {demand.what, demand.of}:  # axes of other models
                continue
            size, unit = numbers[demand.what], max(numbers[demand.of], 1)
            if size % unit:
                near = [each for each in (size - size % unit, size - size % unit + unit) if each]
                raise MultipleError(
                    f"{demand.what} {size} is no multiple of {demand.of} {unit}, but a {self.name} "
                    f"model needs that, {demand.why}",
                    f"choose {' or '.join(map(str, near))}, or another {demand.of}",
                )
        return complete

    def _filled_in(self, config: Config) -> dict[str, Any]:
        """The config with other names, defaults and what the class computes."""
        needed = [key for key, entry in self.axes.items() if not callable(entry)]
        # One that is missing is reported later.
        complete = {**dict.fromkeys(needed), **self.with_current_keys(config)}
        for key, other in self.aliases.items():
            if complete.get(key) is None and other in config:
                complete[key] = config[other]
        for key, default in self.defaults.items():
            if complete.get(key) is None or key in self.derived:
                if not callable(default):
                    complete[key] = default
                    continue
                texts = dict.fromkeys(k for k in self.size_keys if isinstance(complete.get(k), str))
                try:
                    complete[key] = default(complete | texts)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                    complete[key] = None  # a size it depends on is bad, and is reported later
        return complete

    def with_current_keys(self, config: Config) -> Config:
        """The config with today's names of keys; where it has both, today's key decides."""
        current = {key: value for key, value in config.items() if key not in self.former}
        for former, key in self.former.items():
            if config.get(former) is not None and current.get(key) is None:
                current[key] = config[former]
        return current

    def check_bounds(self, config: Config, where: str) -> None:
        """Refuse sizes beyond all models before anything is made that grows with them.

        Raises:
            InputError: names the key.
        """
        counted = 1
        for key in self.axes:
            many = self.axes[key] in (("layers",), ("experts",))
            most = MOST_LAYERS if many else MOST_SIZE
            value = config.get(key, config.get(self.aliases.get(key, key)))
            largest = max((v for v in _listed(value) if isinstance(v, int)), default=0)
            if largest > most:
                raise InputError(
                    f"{key} is {largest} in config.json of {where}; at most {most:,} was "
                    "expected, correct it"
                )
            counted *= largest if many else 1
        if counted > MOST_EXPERTS:
            raise InputError(
                f"config.json of {where} promises {counted:,} experts in all layers; at most "
                f"{MOST_EXPERTS:,} was expected, correct it"
            )

    def sizes(self, config: Config) -> dict[str, int]:
        """The size of every axis."""
        return self._solve(self.complete(config))

    @property
    def size_keys(self) -> set[str]:
        """Every config key of a size."""
        return {*self.axes, *self.aliases.values(), *self.ratios}

    def axes_of(self, config: Config) -> dict[str, Axes]:
        """The axes behind every size in a completed config."""
        return {
            key: axes
            for key, entry in self.axes.items()
            if (axes := entry(config) if callable(entry) else entry)
        }

    def _solve(self, complete: Config) -> dict[str, int]:
        """The size of every axis, key by key."""
        sizes = dict(self.constants)
        for key, axes in self.axes_of(complete).items():
            value = complete.get(key)
            least = 0 if key in self.may_be_zero else 1
            if key in self.per_layer:
                sizes |= self._solve_per_layer(key, axes, value, sizes["layers"])
                continue
            if not isinstance(value, int) or not _is_size(value, least):
                others = complete.keys() - self.size_keys - self.defaults.keys()
                meant = nearest(key, others) if value is None else None
                raise InputError(
                    f"config.json of a {self.name} model needs {key} as a positive whole number, "
                    f"but has {value!r}" + (f"; is {meant!r} to be {key!r}?" if meant else "")
                )
            unknown = [axis for axis in axes if axis not in sizes]
            rest = value - sum(sizes[axis] for axis in axes if axis in sizes)
            if unknown and rest % len(unknown):
                raise InputError(
                    f"{key} is {value}, but a {self.name} model needs a multiple of {len(unknown)}"
                )
            if rest < least * len(unknown) or (not unknown and rest):
                raise InputError(
                    f"{key} is {value} in config.json, which leaves nothing for "
                    f"{' and '.join(unknown) or 'the rest'}; correct it or the other sizes"
                )
            sizes |= {axis: rest // len(unknown) for axis in unknown}
            sizes |= {axis: sizes[of] for axis, of in self.same.items() if of in sizes}
        return sizes

    def _solve_per_layer(self, key: str, axes: Axes, value: Any, layers: int) -> dict[str, int]:
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(_is_size(each, 1) for each in values):
            raise InputError(
                f"config.json of a {self.name} model needs {key} as a positive whole number, or a "
                f"list of {layers} of them, one per layer, but has {value!r}"
            )
        return {f"{axis}_{layer}": size for axis in axes for layer, size in enumerate(values)}

    def expresses(self, config: Config, sizes: Mapping[str, int]) -> bool:
        """Whether the model class can have these sizes."""
        try:
            found = self.sizes(self._with_sizes(config, sizes))
        except InputError:  # of config keys that contradict one another
            return False
        return all(found[axis] == size for axis, size in sizes.items())

    def _with_sizes(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config with every key of a size."""
        resized = dict(config)
        complete = self.complete(config)
        for key, axes in self.axes_of(complete).items():
            # No method grows what differs between layers.
            if key in self.per_layer or (key in self.derived and key not in config):
                continue
            value = sum(sizes[axis] for axis in axes)
            # A default may depend on other sizes (head_dim on hidden_size): it is written out.
            if (
                config.get(key) is not None
                or value != complete[key]
                or callable(self.defaults.get(key))
            ):
                other = self.aliases.get(key, key)
                resized[other if config.get(key) is None and other in config else key] = value
        for key, (axis, of) in self.ratios.items():
            if sizes[axis] % sizes[of] == 0:
                resized[key] = sizes[axis] // sizes[of]
        return resized


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_size(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
