"""Growth by copies: from the sizes that users ask for to plans.

Shared by all methods that grow by choosing copies (``growkit.algebra.law``), which can also give a
model a separate head, and more tokens: new rows of the embedding and of the head. Logits of the old
tokens do not change. The softmax does: what it gives to new tokens, it takes from the old ones.
With the mean of all rows, the logit of a new token is the mean of all logits, so that it is never
the largest. With zero it is zero, which may be more than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from growkit.algebra.axes import Pattern, Role
from growkit.algebra.expansion import NOTHING
from growkit.algebra.law import Rows
from growkit.algebra.splits import LEAST_SNR_DB, Shares
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, Weights
from growkit.families.family import Family, stored_family
from growkit.families.sizes import MOST_SIZE
from growkit.growth.expanding import expand, placed_copies
from growkit.planning.operation import (
    Change,
    Operation,
    Option,
    Row,
    SizeOption,
    Switch,
    Value,
    check_whole,
    is_within,
    size_factor,
)
from growkit.planning.plan import Plan, Planned, unused_tensors
from growkit.planning.transforms import Kept, Mapped, Slices, Transform, row_maps

AT_A_TIME = 1024
"""Rows that are added up at a time; another number may give other last bits."""

DEFAULT_SNR_DB = 10.0
MOST_SNR_DB = 300


SYMMETRY = Option(
    "symmetry",
    "how weights are split among copies: at random (break), so that copies can diverge in "
    "training; evenly (keep), as HyperCloning was published, so that they stay equal; or in fixed "
    "shares of 1, 3, 5 and so on (uneven), so that they diverge in the same way in every run",
    ("break", "keep", "uneven"),
)
MOMENTS = Option(
    "moments",
    "what an optimizer's state (--optimizer) starts with for copies: the moments of what they copy "
    "(copy), or, for all but the first, none (reset), so that even copies diverge too",
    ("copy", "reset"),
)
GROUPS = Option(
    "groups",
    "what a copy of a KV head serves: copies of its whole group (whole), so that all of its copies "
    "train alike, or of a part of the group (part), so that they diverge; auto is whole with "
    "--symmetry keep",
    ("auto", "whole", "part"),
)
PROMISE = Option(
    "promise",
    "what may happen to the function: nothing (exact); or, for a size that cannot be had "
    "otherwise, one rounding of some tensors (bounded)",
    ("exact", "bounded"),
)
SNR_DB = Option(
    "snr_db",
    "how even random splits are, as a signal-to-noise ratio of 4.78 to 300 dB: the higher, the "
    f"more alike the parts; {DEFAULT_SNR_DB:g} by default",
    form="DB",
    accepts=partial(is_within, least=LEAST_SNR_DB, most=MOST_SNR_DB),
)
VOCAB = SizeOption("vocab", "vocabulary; logits of the old tokens stay the same", axes=("vocab",))
NEW_TOKENS = Option(
    "new_tokens",
    "what embedding and head hold for new tokens: the mean of all others, or zero",
    ("mean", "zero"),
)
UNTIE = Switch("untie", "give a model whose output head is its embedding a separate head")


def shares_of(options: Mapping[str, str], seed: int) -> Shares:
    """How weights are split, by ``SYMMETRY`` and ``SNR_DB``."""
    symmetry, snr_db = options["symmetry"], float(options.get("snr_db", DEFAULT_SNR_DB))
    return Shares(snr_db if symmetry == "break" else None, seed, symmetry == "uneven")


@dataclass(frozen=True)
class CopyMethod(Operation):
    """A growth method that copies whole spaces.

    Attributes:
        name: as on the command line.
        paper: name and address of the source.
        sizes: which spaces it copies, and which size follows which.
        needs: axes without which the method makes no sense.
        rows: see ``Operation``.
    """

    name: str
    paper: str
    sizes: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``Operation``."""
        return (*self.sizes, VOCAB, NEW_TOKENS, UNTIE, PROMISE, SYMMETRY, GROUPS, SNR_DB, MOMENTS)

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``Operation``."""
        old = family.sizes(config)
        if not old.get("noise_heads"):
            return True  # nothing that the DIFF Transformer could do for it
        return family.expresses(config, {**old, **self.grown(family, config, options)})

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Sizes as factors, unless the family lacks the axis or the size is no multiple."""
        factors = dict(options)
        for option in self.sizes:
            axes = _axes(family, config, option)
            if option.name in options and axes:
                with suppress(InputError):
                    current = _current_size(family, config, option, axes)
                    ratio = size_factor(option.name, options[option.name], current)
                    factors[option.name] = f"x{ratio}"
        return factors

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        shares = shares_of(options, seed)
        groups = options.get("groups", "auto")
        if groups == "auto" and not shares.parting:
            groups = "whole"
        resets = options.get("moments") == "reset"
        settled: dict[str, Value | None] = {
            "groups": None if groups == "auto" else groups,
            "symmetry": options["symmetry"],
            "snr_db": shares.snr_db,
            "moments": "reset" if resets else None,
            "new_tokens": options["new_tokens"] if "vocab" in options else None,
        }
        plans: list[Plan] = []
        for prepare in (_untied, _with_vocabulary):
            if plan := prepare(source, options):
                plans.append(plan)
                source = Planned(source, plan)
        lost = [plan.lost for plan in plans if plan.lost]
        family = stored_family(source)
        old = family.sizes(source.config)
        for axis in self.needs:
            if not old.get(axis):
                raise InputError(
                    f"{self.name} grows models with {axis}, but {source.where()} is a "
                    f"{family.name} model without; choose another method"
                )
        grown = self.grown(family, source.config, options)
        if grown:
            whole, rounding = groups == "whole", options.get("promise") == "bounded"
            copies = partial(placed_copies, family, source.config, old, grown, whole_groups=whole)
            plan = expand(source, family, grown, copies, shares, rounding=rounding, resets=resets)
            plans.append(plan)
            if rounded := list(plan.recomputed_sources):
                tensors = f"{len(rounded)} tensors" if len(rounded) > 1 else "a tensor"
                lost.append(f"one rounding of every element of {tensors} (first {rounded[0]})")
                return Change(plans, "bounded", "; ".join(lost), settled, by_rounding=True)
        if not plans:
            names = ", ".join("--" + option.name.replace("_", "-") for option in self.sizes)
            raise InputError(f"nothing would grow; give at least one of {names} a factor like x2")
        return Change(plans, "exact", "; ".join(lost), settled)

    def grown(self, family: Family, config: Config, options: Mapping[str, str]) -> dict[str, int]:
        """The new size of every axis that grows.

        Raises:
            InputError: a size cannot be had.
        """
        present = family.sizes(config)
        ratios: dict[str, Fraction] = {}
        grown: dict[str, int] = {}
        for option in self.sizes:
            axes = _axes(family, config, option)
            size = options.get(option.name)
            ratio = ratios[option.follows] if option.follows else Fraction(1)
            if size is not None:
                if not axes:
                    raise InputError(f"a {family.name} model has no {option.name} to grow")
                current = _current_size(family, config, option, axes)
                ratio = size_factor(option.name, size, current)
                named = {axis: present[axis] * ratio for axis in axes if axis in option.axes}
                check_whole(option.name, size, named)
            # What follows stays where that would make it no whole number.
            sizes = {axis: present[axis] * ratio for axis in axes}
            whole = {axis: int(new) for axis, new in sizes.items() if new.denominator == 1}
            grown |= {axis: new for axis, new in whole.items() if new != present[axis]}
            ratios[option.name] = ratio if len(whole) == len(axes) else Fraction(1)
        return grown


def _axes(family: Family, config: Config, option: SizeOption) -> list[str]:
    """The axes of a model that an option grows: those it names, and those that grow with them."""
    present = family.sizes(config)
    return [axis for axis in present if family.kinds.get(axis, axis) in option.axes]


def _current_size(family: Family, config: Config, option: SizeOption, axes: list[str]) -> int:
    """A size in the config's own units: DiffLlama's heads are signal and noise heads together.

    Where experts have a width of their own, it is that of the axes that the option names.
    """
    axes = [axis for axis in axes if axis in option.axes] or axes[:1]
    complete = family.complete(config)
    sizes = family.sizes(config)
    for key, parts in family.axes_of(complete).items():
        if set(parts) == set(axes):
            return int(complete[key])
    distinct = [axis for axis in axes if axis not in family.same]
    return sum(sizes[axis] for axis in distinct or axes)


def _untied(source: Weights, options: Mapping[str, str]) -> Plan | None:
    """Plan a separate head, if it is asked for.

    Raises:
        InputError: there is one already.
    """
    if "untie" not in options:
        return None
    family = stored_family(source)
    if not family.complete(source.config).get("tie_word_embeddings"):
        raise InputError(
            f"the {family.name} model in {source.where()} has a head of its own already; leave "
            "--untie out"
        )
    unused = unused_tensors(source, family)
    before = family.patterns(source.config)
    config = {**source.config, "tie_word_embeddings": False}
    (embedding,) = (name for name, each in before.items() if "vocab" in each.axes(Role.READ))
    separate = Kept(embedding, why="the embedding, as it is")
    made = {name: Kept(name) if name in before else separate for name in family.patterns(config)}
    return Plan.made(source, family, config, made, unused=unused)


def _with_vocabulary(source: Weights, options: Mapping[str, str]) -> Plan | None:
    """Plan new rows, if they are asked for.

    Raises:
        InputError: there cannot be so many.
    """
    if "vocab" not in options:
        return None
    family = stored_family(source)
    sizes = family.sizes(source.config)
    old = sizes["vocab"]
    size = old * size_factor("vocab", options["vocab"], old)
    check_whole("vocab", options["vocab"], {"vocab": size})
    if size > MOST_SIZE:
        raise InputError(f"vocab {int(size):,} is more than {MOST_SIZE:,}; choose a smaller size")
    new = int(size)
    if new == old:
        return None
    rows = (*range(old), *[NOTHING] * (new - old))
    unused = unused_tensors(source, family)
    mean = options["new_tokens"] == "mean"
    why = f"{new - old} new tokens, at {'the mean' if mean else 'zero'}"
    made: dict[str, Transform] = {}
    for name, tensor, _ in family.members(source.config):
        first, *others = Pattern.parse(tensor.pattern).dimensions
        assert all("vocab" not in each.axes for each in others), "a row is a token"
        made[name] = Kept(name)
        if "vocab" in first.axes:
            maps = partial(row_maps, source.tensors[name].shape, rows, first.role)
            made[name] = MoreRows(name, maps, why, mean=mean)
    lost = (
        f"{new - old} new tokens share the softmax: logits of the {old} old ones stay, their "
        "probabilities do not"
    )
    config = family.resized(source.config, {**sizes, "vocab": new})
    return Plan.made(source, family, config, made, unused=unused, lost=lost)


@dataclass(frozen=True, eq=False)
class MoreRows(Mapped):
    """A tensor with more rows: zeros, or each the mean of those that it had, rounded once.

    Attributes:
        mean: whether they are the mean.
        found: the mean, once it was needed: the whole tensor is read for it.
    """

    mean: bool = False
    found: dict[str, Tensor] = field(default_factory=dict)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        made = super().part(source, where)
        rows, *others = where
        if self.mean and rows.stop > self._old:
            if self.source not in self.found:
                self.found[self.source] = _mean(partial(source.read, self.source), self._old)
            made[max(self._old - rows.start, 0) :] = self.found[self.source][tuple(others)]
        return made

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``; with the first rows, the new ones are checked.

        A gradient has rows only for tokens that occur, and none of these are new.
        """
        if of.start == 0 and len(rows(slice(self._old, self._old + 1))):
            expected = _mean(rows, self._old).double() if self.mean else 0.0
            for begin in range(self._old, len(self.maps[0]), AT_A_TIME):
                new = rows(slice(begin, min(begin + AT_A_TIME, len(self.maps[0]))))
                if not bool((new.double() == expected).all()):
                    return None
        return rows(of)

    @property
    def _old(self) -> int:
        return self.maps[0].size


def _mean(rows: Rows, count: int) -> Tensor:
    """The mean of rows, with the same bits on every machine."""
    total, dtype = None, None
    for begin in range(0, count, AT_A_TIME):
        some = rows(slice(begin, min(begin + AT_A_TIME, count)))
        dtype, some = some.dtype, some.double()
        while len(some) > 1:  # an order that is not left to torch
            half = len(some) // 2
            some = torch.cat([some[:half] + some[half : 2 * half], some[2 * half :]])
        total = some[0] if total is None else total + some[0]
    assert total is not None
    return (total / count).to(dtype)
