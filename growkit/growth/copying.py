"""Growth by copies: from the sizes that users ask for to plans.

Shared by all methods that grow by choosing copies (``growkit.algebra.law``), which can also give a
model a separate head, and more tokens: new rows of the embedding and of the head. Logits of the old
tokens do not change. The softmax does: what it gives to new tokens, it takes from the old ones.
With the mean of all rows, the logit of a new token is the mean of all logits, so that it is never
the largest. With zero it is zero, which may be more than all of them.

From sizes to expansions, one for each space that grows, and from these to transforms.

Where copies go: whole factors copy whole spaces. Any other size takes copies as they come: the
first coordinates have one more. Members of groups follow what serves them. A space that a norm
takes the mean over has as many whole copies as fit, and zeros after them. Coordinates that compute
with their number go where they compute the same, and no weight reads the copies elsewhere yet.

Copies side by side make one copy of a key-value head serve one query head, and the other copy
another: they get different gradients, and part. To keep them equal, every copy serves a copy of the
whole group.

What is multiplied: a norm takes the mean over a space. Copies of everything leave it as it is;
zeros make it smaller, and the normed numbers larger: the weight takes that back, and what is added
to the mean (eps, a key of the config) shrinks in proportion. Powers of two are exact, so zeros that
make a space four times as large round nothing. Uneven copies change a mean in a way that depends on
the input, which no weight takes back. Other numbers of zeros round the weights of norms once, which
only the promise *bounded* allows. A class may also multiply tensors by a number from sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from growkit.algebra import expansion
from growkit.algebra.axes import Dimension, Order, Pattern, Role
from growkit.algebra.expansion import NOTHING, Expansion, IndexMap
from growkit.algebra.law import Rows
from growkit.algebra.splits import LEAST_SNR_DB, Shares
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import Config, Weights
from growkit.families.description import MOST_SIZE, Norm
from growkit.families.description import Tensor as Described
from growkit.families.family import Family, stored_family
from growkit.planning import operation
from growkit.planning.operation import Change, Operation, Option, SizeOption, Switch, Value
from growkit.planning.plan import Plan, Planned, unused_tensors
from growkit.planning.transforms import (
    Beside,
    Kept,
    Mapped,
    Rounded,
    Slices,
    Transform,
    row_maps,
)

AT_A_TIME = 1024
"""Rows that are added up at a time; another number may give other last bits."""

DEFAULT_SNR_DB = 10.0
MOST_SNR_DB = 300


SYMMETRY = Option(
    "symmetry",
    "how weights are split among copies: at random (break), so that they diverge in training; "
    "evenly (keep), so that they stay equal; or in fixed shares of 1, 3, 5 and so on (uneven)",
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
    "what a copy of a KV head serves: copies of its whole group (whole), or of a part of the group "
    "(part), so that copies of the head diverge; auto is whole with --symmetry keep",
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
    accepts=partial(operation.is_within, least=LEAST_SNR_DB, most=MOST_SNR_DB),
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
    """

    name: str
    paper: str
    sizes: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()

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
                    factors[option.name] = f"x{option.factor(options[option.name], current)}"
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
                named = {axis: present[axis] for axis in axes if axis in option.axes}
                ratio = option.factor(size, _current_size(family, config, option, axes), named)
            # What follows stays where that would make it no whole number.
            sizes = {axis: present[axis] * ratio for axis in axes}
            whole = {axis: int(new) for axis, new in sizes.items() if new.denominator == 1}
            grown |= {axis: new for axis, new in whole.items() if new != present[axis]}
            ratios[option.name] = ratio if len(whole) == len(axes) else Fraction(1)
        return grown


def _axes(family: Family, config: Config, option: SizeOption) -> list[str]:
    """The axes of a model that an option grows: those it names, and those that grow with them."""
    return [axis for axis in family.sizes(config) if family.kinds.get(axis, axis) in option.axes]


def _current_size(family: Family, config: Config, option: SizeOption, axes: list[str]) -> int:
    """A size in the config's own units: DiffLlama's heads are signal and noise heads together.

    Where experts have a width of their own, it is that of the axes that the option names.
    """
    axes = [axis for axis in axes if axis in option.axes] or axes[:1]
    complete, sizes = family.complete(config), family.sizes(config)
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
        raise InputError(f"{source.where()} has a head of its own already; leave --untie out")
    before = family.patterns(source.config)
    config = {**source.config, "tie_word_embeddings": False}
    (embedding,) = (name for name, each in before.items() if "vocab" in each.axes(Role.READ))
    separate = Kept(embedding, why="the embedding, as it is")
    made = {name: Kept(name) if name in before else separate for name in family.patterns(config)}
    return Plan.checked(source, family, config, made, unused=unused_tensors(source, family))


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
    new = int(old * VOCAB.factor(options["vocab"], old))
    if new > MOST_SIZE:
        raise InputError(f"vocab {new:,} is more than {MOST_SIZE:,}; choose a smaller size")
    if new == old:
        return None
    rows = (*range(old), *[NOTHING] * (new - old))
    unused = unused_tensors(source, family)
    mean = options["new_tokens"] == "mean"
    why = f"{new - old} new tokens, at {'the mean' if mean else 'zero'}"
    made: dict[str, Transform] = {}
    for each in family.members(source.config):
        name, (first, *others) = each.name, each.pattern.dimensions
        assert all("vocab" not in other.axes for other in others), "a row is a token"
        made[name] = Kept(name)
        if "vocab" in first.axes:
            maps = partial(row_maps, source.tensors[name].shape, rows, first.role)
            made[name] = MoreRows(name, maps, why, mean=mean)
    lost = (
        f"{new - old} new tokens share the softmax: logits of the {old} old ones stay, their "
        "probabilities do not"
    )
    config = family.resized(source.config, {**sizes, "vocab": new})
    return Plan.checked(source, family, config, made, unused=unused, lost=lost)


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

    def beside(self, one: Beside) -> Transform | None:
        """See ``Transform``; what goes with the tensor has zeros in new rows."""
        made = super().beside(one)
        return replace(made, found={}) if isinstance(made, MoreRows) else made

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


BOUNDED = "--promise bounded"
"""The option that allows tensors to be rounded once."""


def expand(
    source: Weights,
    family: Family,
    sizes: Mapping[str, int],
    expansions: Callable[[], Mapping[str, Expansion]],
    shares: Shares,
    *,
    rounding: bool = False,
    resets: bool = False,
) -> Plan:
    """Plan a growth.

    Args:
        source: the checkpoint.
        family: of the source, in the form that its tensors have.
        sizes: new size of every axis that grows.
        expansions: gives the expansion of each of these axes, once their sizes are known to be
            possible.
        shares: how weights are split over copies.
        rounding: whether tensors may be rounded once, where nothing exact exists.
        resets: whether an optimizer's moments of copies begin anew.

    Raises:
        InputError: the checkpoint does not fit its config, or the model class cannot have these
            sizes, or cannot compute the same with these expansions.
    """
    unused = unused_tensors(source, family)
    old = family.sizes(source.config)
    new = {**old, **sizes}
    for axis, why in family.fixed(family.complete(source.config)).items():
        if new[axis] != old[axis]:
            raise InputError(f"{axis} of the {family.name} model in {source.where()} {why}")
    config = family.resized(source.config, new)
    made = expansions()
    assert {axis: len(each.source) for axis, each in made.items()} == dict(sizes)
    growth = _Growth(family, old, new, made, shares, rounding, resets)
    apart = growth.check_groups()
    config = growth.config(source.config, config)
    grown = {
        name: growth.transform(name, of, tensor)
        for name, of, tensor in growth.members(source.config, config)
    }
    copies = {axis: int(each.counts.max(initial=0)) for axis, each in made.items()}
    return Plan.checked(source, family, config, grown, unused=unused, copies=copies, apart=apart)


@dataclass(frozen=True)
class _Growth:
    """One growth.

    Attributes:
        family: of the model.
        old: size of every axis in the source.
        new: likewise in the target.
        made: the expansion of every axis that grows.
        shares: see ``expand``.
        rounding: see ``expand``.
        resets: see ``expand``.
        known: index maps, each made once, when it is needed: layers are alike.
    """

    family: Family
    old: Mapping[str, int]
    new: Mapping[str, int]
    made: Mapping[str, Expansion]
    shares: Shares
    rounding: bool
    resets: bool
    known: dict[tuple[Dimension, Order | None, bool], IndexMap] = field(default_factory=dict)

    def members(self, source: Config, target: Config) -> Iterator[tuple[str, str, Described]]:
        """Every tensor of the target: its name, the name of its source, and its description.

        Where each head has a tensor of its own, each copy of a head has one.
        """
        before = {(e.tensor.name, e.layer, e.number): e.name for e in self.family.members(source)}
        for name, tensor, layer, number in self.family.members(target):
            grown = self.made.get(tensor.counts or "")
            if grown:
                number = int(grown.source[number])
            yield name, before[tensor.name, layer, number], tensor

    def check_groups(self) -> str:
        """Why copies of what serves groups train apart: they serve different members; else "".

        Raises:
            InputError: copies of members would be served by copies of what did not serve them.
        """
        for axis, serving in _pairs(self.family, self.old):
            if not self.made.keys() & {axis, serving}:
                continue
            members, groups = (
                self.made.get(name) or expansion.in_blocks(self.old[name], 1)
                for name in (axis, serving)
            )
            _check_multiple(axis, len(members.source), serving, groups)
            by_copy = members.source.reshape(len(groups.source), -1)
            served = by_copy // (self.old[axis] // self.old[serving])
            if not ((served == groups.source[:, None]) | (by_copy == NOTHING)).all():
                raise InputError(
                    f"copies of {axis} are not next to what serves them, copies of {serving}; "
                    f"grow {axis} and {serving} by whole factors"
                )
            if serving in self.made:
                by_copy = np.sort(by_copy, axis=1)
                first = np.zeros((groups.size, by_copy.shape[1]), np.int64)
                first[groups.source] = by_copy  # of any copy
                if not (first[groups.source] == by_copy).all():
                    return f"copies of {serving} serve different {axis}"
        return ""

    def config(self, source: Config, config: Config) -> Config:
        """The target's config with what its norms add to the means.

        Args:
            source: the source's config.
            config: the target's, in which sizes have been set.

        Raises:
            InputError: there is no such config.
        """
        before = self.family.complete(source)
        shrunk: dict[str, dict[float, str]] = {}
        for norm in _norms(self.family, before):
            mean = self._mean(norm)
            if norm.eps is None and mean != 1:
                raise self._refusal(norm.over, "what their class adds to the mean is fixed")
            if norm.eps is not None:
                shrunk.setdefault(norm.eps, {})[mean] = norm.over
        changed: Config = {}
        for key, means in shrunk.items():
            if self.rounding and len(means) == 2:  # where nothing grows, eps is next to nothing
                means.pop(1.0, None)
            if len(means) > 1:
                why = f"{key} serves norms over both, that change apart"
                raise self._refusal(" and ".join(means.values()), why)
            (mean,) = means
            if mean == 1:
                continue
            if type(before[key]) not in (int, float):
                raise InputError(f"config.json has {key} {before[key]!r}; a number was expected")
            changed[key] = before[key] * mean
        if not changed:
            return config
        config = config | changed
        # What the class would derive from that stays what it was.
        after = self.family.complete(config)
        derived = {k: before[k] for k in self.family.defaults if before[k] != after[k]}
        return config | {k: value for k, value in derived.items() if k not in config}

    def transform(self, name: str, of: str, tensor: Described) -> Transform:
        """How a tensor is made of another."""
        factor, rounds = self._factor(tensor)
        pattern = Pattern.parse(tensor.pattern)
        if not rounds and all(each.axes.isdisjoint(self.made) for each in pattern.dimensions):
            return Kept(of, factor)
        why = ", ".join(
            f"{verb} {axis} "
            + (f"×{n}" if (n := self.made[axis].copies) else f"{self.old[axis]} → {self.new[axis]}")
            for role, verb in ((Role.WRITTEN, "repeat"), (Role.READ, "split"))
            for axis in sorted(pattern.axes(role) & self.made.keys())
        )
        # Where the class adds something, parts of the tensor would be parts of another number, so
        # that whole copies are read, as many as the factor.
        wholes = int(factor) if tensor.offset and not rounds else None
        if wholes is None and (factor != 1 or rounds):
            why += f", times {factor:.6g}" if factor != 1 else ""
            why += ", rounded once" if rounds else ""
        return (Rounded if rounds else Mapped)(
            of,
            partial(self._maps, tensor, wholes),
            why,
            name,
            self.shares,
            factor if wholes is None else 1.0,
            offset=tensor.offset,
            resets=self.resets,
        )

    def _factor(self, tensor: Described) -> tuple[float, bool]:
        """What a tensor is multiplied by, and whether that rounds.

        Raises:
            InputError: it would round, but must not; or there is no such number.
        """
        factor = math.sqrt(self._mean(tensor.norm)) if tensor.norm else 1.0
        if tensor.scale:
            factor *= tensor.scale(self.old) / tensor.scale(self.new)
        read = Pattern.parse(tensor.pattern).axes(Role.READ) & self.made.keys()
        copies = math.prod(int(self.made[axis].counts.min()) for axis in read)
        by_two = math.frexp(factor)[0] == 0.5
        fits = not tensor.offset or 1 <= factor <= copies
        if self.rounding or (by_two and fits):
            return factor, not (by_two and fits)
        grows = " and ".join(sorted(axis for axis in self.made if axis in tensor.pattern))
        adds = f", to which its class adds {tensor.offset:g}," if by_two else ""
        how = "whole copies" if by_two else "powers of four"
        if not by_two and not tensor.scale:
            axis = tensor.norm.over if tensor.norm else ""
            old, new = self.old[axis], self.new[axis]
            near = [str(size) for size in (new // old * old, (new // old + 1) * old) if size > old]
            how += f", by whole copies (to {' or '.join(near)})"
        raise InputError(
            f"{tensor.name} of a {self.family.name} model{adds} would be multiplied by "
            f"{factor:.6g}, which rounds; {grows} can grow by {how}, or as asked with {BOUNDED}"
        )

    def _mean(self, norm: Norm) -> float:
        """The mean square of a space in the target, as a part of that in the source."""
        grown = self.made.get(norm.over)
        if grown is None or grown.copies:
            return 1.0
        if grown.counts.min() != grown.counts.max():
            raise self._refusal(norm.over, "uneven copies do not keep it")
        if norm.centred:
            raise self._refusal(norm.over, "and take away the mean, which zeros do not keep")
        return float(grown.counts.sum()) / len(grown.source)

    def _refusal(self, axis: str, why: str) -> InputError:
        return InputError(
            f"{axis} cannot grow like this: norms of a {self.family.name} model take a mean over "
            f"it, {why}; choose whole copies, or leave it as it is"
        )

    def _maps(self, tensor: Described, wholes: int | None) -> tuple[IndexMap, ...]:
        found = []
        for number, dimension in enumerate(Pattern.parse(tensor.pattern).dimensions):
            order, weighs = tensor.order if number == 0 else None, tensor.norm is not None
            key = dimension, order, weighs
            if key not in self.known:
                self.known[key] = expansion.index_map(
                    dimension,
                    self.old,
                    self.made,
                    (order(self.old), order(self.new)) if order else None,
                    weighs=weighs,
                    uneven=self.shares.uneven,
                )
            found.append(self.known[key])
        return tuple(found if wholes is None else [each.in_wholes(wholes) for each in found])


def placed_copies(
    family: Family,
    config: Config,
    old: Mapping[str, int],
    new: Mapping[str, int],
    *,
    whole_groups: bool = False,
) -> dict[str, Expansion]:
    """The expansion of every axis that grows.

    Args:
        family: of the model.
        config: of the source.
        old: size of every axis in the source.
        new: of every axis that grows, its size in the target, which the class can have.
        whole_groups: whether every copy is to serve copies of all that was served, where there are
            as many.

    Raises:
        InputError: groups have no room for copies of all their members.
    """
    normed = {norm.over for norm in _norms(family, family.complete(config))}
    apart = _apart(family, old, new)
    if whole_groups:
        apart |= _in_whole_groups(family, old, new)
    found: dict[str, Expansion] = {}

    def place(axis: str) -> None:
        servants = _servants(family, old, axis)
        for each in servants:  # first
            place(each)
        size, grouped = new.get(axis, old[axis]), axis in family.grouped
        if axis in apart and servants:
            found[axis] = _beside(old, axis, size, servants[0], found[servants[0]])
        elif size != old[axis] and axis in family.places:
            found[axis] = expansion.in_places(old[axis], family.places[axis](old[axis], size))
        elif size % old[axis] and axis in normed and not grouped:
            found[axis] = expansion.filled_up(old[axis], size)
        else:
            found[axis] = expansion.uneven(old[axis], size, groups=grouped)

    for axis in new:
        place(axis)
    return {axis: found[axis] for axis in new}


def _norms(family: Family, complete: Config) -> Iterator[Norm]:
    for tensor in family.tensors:
        if tensor.norm and tensor.when(complete):
            yield tensor.norm
    yield from family.norms


def _servants(family: Family, old: Mapping[str, int], axis: str) -> list[str]:
    """The axes that serve the groups of an axis in this model, the smallest groups first."""
    return [each for each in family.served.get(axis, ()) if old.get(each)]


def _pairs(family: Family, old: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every axis of members in this model, with each axis that serves its groups."""
    axes = (axis for axis in family.served if old.get(axis))
    return [(axis, each) for axis in axes for each in _servants(family, old, axis)]


def _apart(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes of groups whose members cannot be copied as neighbours.

    Copies of neighbours are in the group of what serves them if everything in it is copied by whole
    factors.
    """
    apart = {axis for axis, size in new.items() if size % old[axis]}
    for axis in (*family.served, *family.served):  # noise heads are served, and serve
        together = {axis, *_servants(family, old, axis)}
        if together & apart:
            apart |= together
    return apart


def _in_whole_groups(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes whose members must be copied group by group, so that all copies serve the same.

    None if there are not enough members for that.
    """
    pairs, parting = _pairs(family, old), False
    for axis, serving in pairs:
        members, copies = old[axis] // old[serving], new.get(serving, 0) // old[serving]
        if new.get(axis, old[axis]) % (members * new.get(serving, old[serving])):
            return set()
        parting |= members > 1 and copies > 1
    return {axis for axis, _ in pairs} if parting else set()


def _beside(
    old: Mapping[str, int], axis: str, size: int, servant: str, groups: Expansion
) -> Expansion:
    """Copies of the members of groups next to copies of what serves them; see ``placed_copies``."""
    _check_multiple(axis, size, servant, groups)
    members, places = old[axis] // old[servant], size // len(groups.source)
    if places * int(groups.counts.min()) < members:
        raise InputError(
            f"{axis} cannot become {size} with {len(groups.source)} {servant}, which each serve "
            f"{members}; choose at least {len(groups.source) * members} {axis}, or fewer {servant}"
        )
    return expansion.following(groups, old[axis], size)


def _check_multiple(axis: str, size: int, serving: str, groups: Expansion) -> None:
    if size % len(groups.source):
        raise InputError(
            f"{size} {axis} are no multiple of the {len(groups.source)} {serving} that would serve "
            "them; grow both, or correct the family's groups"
        )
