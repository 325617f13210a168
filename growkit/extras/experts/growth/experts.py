"""More experts: copies of a model's experts, with their rows of the router.

Every expert gets c copies, and every token goes through c times as many experts. Copies of an
expert get equal router logits, so the c·k largest logits belong to all copies of the k experts that
were chosen before. The weights of the copies add up to the weight of the expert:

- Softmax over the chosen experts: w_i = exp l_i / Σ_chosen exp l_j. Every term occurs c times in
  the sum, so each copy weighs w_i / c.
- Softmax over all experts before the choice: the same, with the sum over all experts.
- Sigmoid of each logit, divided by the sum over the chosen experts: the same. Without the division
  each copy weighs as much as the expert, so the factor of all weights is divided by c. If there
  is no factor, the last matrices are parts that add up to the expert's matrix.
- Groups of experts, if some groups are chosen first: copies come in blocks, so that whole groups
  are copied and c times as many groups are chosen.

A loss that balances experts is, with top-k, c times as large, so its coefficient is divided by c.

Equal copies stay equal. As they are chosen together with equal weights, their last matrices may be
c times any parts that add up to the expert's matrix: exact random splits let them diverge.

If tokens go through as many experts as before, more experts cost no more (Dwivedi et al., "Expert
Upcycling", arXiv 2604.19835). Copies with equal logits would fill the k places with k/c experts, so
the router distinguishes copies of an expert:

- A softmax does not change if the same number is added to all logits. The logits of all second
  copies are v·x larger, with a random v, and those of all third copies u·x. If these numbers differ
  by more than the first and the last of the k chosen logits, all k experts are of one copy, and
  compute the same as before. Tokens divide by the sign of v·x, so the copies diverge. If the
  softmax is over all experts, the unchosen copies keep the little weight that it gives them.
- A sigmoid does change. If a router adds corrections that affect only the choice, a little noise in
  these decides between copies. If a token uses one group, copies are in groups of their own, and
  each group computes the same as the original group.
- If some experts get more copies than others, no number fits all copies. They share the places, and
  a little noise in their rows lets them diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import frexp, prod

from growkit.algebra.growth_law import Rows
from growkit.algebra.splits import noise
from growkit.base.axes import Role
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.options import MAX_COUNT, Option, Value
from growkit.base.tensors import Config
from growkit.extras.composed_transforms import Computed, Subtensor
from growkit.model.families.family_parts import MAX_EXPERTS, Experts, Member, value_at, with_value
from growkit.model.model import Model
from growkit.operations.growth.copying import SNR_DB, SYMMETRY, shares_of
from growkit.planning import transforms
from growkit.planning.operation import Change, Operation, SizeOption
from growkit.planning.plan import Plan
from growkit.planning.router_ties import lost_in_ties
from growkit.planning.transforms import Kept, Mapped, Transform

EXPERTS = "experts"
"""The axis of experts."""

Order = tuple[int, ...]
"""For each expert, the expert that it copies: all first copies, all second ones, ..."""


NUMBER = SizeOption(
    EXPERTS,
    "number of experts in each layer; under experts a multiple of the present number, or any "
    "larger number with --top-k",
    axes=(EXPERTS,),
    example="x2",
)
TOP_K = Option(
    "top_k",
    "experts that a token goes through; by default two groups of pieces under upcycle; under "
    "experts, multiplied by the same factor",
    form="N",
    kind=int,
    limits=(1, MAX_COUNT),
)


class MoreExperts(Operation):
    """See the module."""

    name = "experts"
    paper = "https://arxiv.org/abs/2604.19835"
    options: tuple[Option, ...] = (NUMBER, TOP_K, SYMMETRY, SNR_DB)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        copying = _Copying(source, options, seed)
        plan = Plan.checked(
            source,
            copying.config,
            {member.name: copying.transform(member) for member in copying.members},
            copies={EXPERTS: copying.order.count(0)},
            divergence="" if copying.together else "copies of an expert train on different tokens",
        )
        settings: dict[str, Value | None] = {"symmetry": options["symmetry"]}
        settings["snr_db"] = copying.shares.snr_db
        return Change([plan], *copying.promise, settings, by_ties=copying.together)


COMMON = 16.0
"""Size of the noise shared by all copies with a number, relative to the router's largest number."""

LITTLE = 2.0**-6
"""Size of the noise of single rows, relative to the router's largest number."""

CORRECTION = 2.0**-20
"""Relative size of noise in corrections: above float32's rounding, below differences of experts."""


def _experts_to_copy(source: Model) -> Experts:
    family = source.family
    if why := family.fixed(source.complete).get(EXPERTS):
        raise InputError(f"experts of the {family.name} model in {source.where()} {why}")
    if family.experts is None:
        raise InputError(f"{source.where()} has no experts to copy; --method upcycle makes some")
    return family.experts


class _Copying:
    """The rules for a model with more experts.

    Args:
        source: the model with fewer experts.
        options: the options of ``MoreExperts``.
        seed: seed of the noise.

    Attributes:
        present: number of experts in the source.
        count: number of experts in the target.
        top_k: number of experts that a token of the target goes through.
        config: config of the target.
        order: see ``Order``.
        members: all tensors of the target.
        weight: weight of a copy, as a part of that of its expert, if all copies are chosen.
        together: whether all copies of a chosen expert are chosen.
        shares: shares of the last matrices; noise distinguishes copies only if these diverge.

    Raises:
        InputError: the numbers are impossible, or the config does not give the number of experts
            that a token goes through.
    """

    def __init__(self, source: Model, options: Mapping[str, str], seed: int) -> None:
        experts, family = _experts_to_copy(source), source.family
        complete, sizes = source.complete, source.sizes
        self._source, self._seed, self.shares = source, seed, shares_of(options, seed)
        self.present, top_k = sizes[EXPERTS], options.get("top_k")
        self.count = wanted_experts(
            options[EXPERTS], self.present, sizes["layers"], multiple=top_k is None
        )
        copies, rest = divmod(self.count, self.present)
        self._evenly = not rest
        self.order = tuple(expert % self.present for expert in range(self.count))
        self.config = dict(family.resized(source.config, sizes | {EXPERTS: self.count}))
        chosen = value_at(complete, experts.top_k)
        if not isinstance(chosen, int) or not 1 <= chosen <= self.present:
            raise InputError(
                f"config.json in {source.where()} has {experts.top_k} {chosen!r}; a number from 1 "
                f"to {self.present} was expected"
            )
        self.top_k = int(top_k) if top_k else copies * chosen
        self.config = with_value(self.config, experts.top_k, self.top_k)
        if self.top_k > self.count:
            raise InputError(
                f"top_k {top_k} is more than {self.count} experts; choose at most {self.count}"
            )
        self.together = self._evenly and self.top_k == copies * chosen
        self._experts, self._chooses = experts, chosen < self.present
        one_group = self._keep_groups(experts, complete, copies)
        self._one_group = self._evenly and one_group and self.top_k == chosen
        experts_only = experts.alone(complete)
        if self.together and experts_only and experts.scaling:
            self.config[experts.scaling] = complete[experts.scaling] / copies
        self._keep_balancing(experts, complete, chosen / self.top_k)
        self.weight = 1.0 if experts_only and not experts.scaling else 1.0 / copies
        self._divided = experts.divided
        halves = (self.shares.parting and self.weight < 1) or experts.divided
        if self.together and halves and copies & (copies - 1):
            raise InputError(
                f"{copies} copies of an expert cannot be split exactly, as their number is not a "
                "power of two; choose one that is, or --symmetry keep for copies that stay equal"
            )
        self.members = family.members(self.config)
        if all(
            (expert_of(m), along_experts(m)) == (None, None)
            for m in self.members
            if m.layer is not None
        ):
            raise InputError(f"no layer of {source.where()} has experts to copy")
        self._corrected = any(map(self._is_correction, self.members))

    def _keep_groups(self, experts: Experts, complete: Config, copies: int) -> bool:
        """Multiply the groups of experts, or those that a token may use, with the copies.

        Returns:
            Whether a token of the source may use only one group.

        Raises:
            InputError: groups would have different sizes.
        """
        groups = [key for key in experts.groups if isinstance(complete.get(key), int)]
        if not self._evenly and any(complete[key] > 1 for key in groups):
            raise InputError(
                f"experts of {self._source.where()} are in groups of equal size, so all need "
                f"equally many copies; choose {(copies + 1) * self.present} experts"
            )
        every = len({complete[key] for key in groups}) < 2  # a token may use all groups
        for key in groups[: 0 if every else None] if self.together else groups[: self._evenly]:
            self.config[key] = copies * complete[key]
        return [complete[key] for key in groups[1:]] == [1]

    def _keep_balancing(self, experts: Experts, complete: Config, factor: float) -> None:
        """Multiply the coefficient of the loss that balances experts, also one of the class."""
        coefficient = value_at(complete, experts.balancing)
        if isinstance(coefficient, int | float):
            self.config = with_value(self.config, experts.balancing, coefficient * factor)

    @property
    def promise(self) -> tuple[str, str]:
        """The promise, and the loss in words."""
        if self.together:
            tied = self._chooses and lost_in_ties(self._source, self._experts, "experts", "copies")
            return ("bounded", tied) if tied else ("exact", "")
        if not (self._one_group and self._corrected):
            return "different", (
                f"a token goes through {self.top_k} of {self.count} experts, and several copies "
                "of one expert may take the places of other experts"
            )
        if not self.shares.parting:
            return "exact", ""
        return "bounded", "experts may be swapped if their router scores differ by less than 1e-6"

    def transform(self, place: Member) -> Transform:
        """Make the transform of a tensor of the target."""
        order = self.order
        splits = self.together and is_last(place) and (self.shares.parting or self.weight == 1)
        parting, expert, copies = splits, expert_of(place), self.count // self.present
        times = 1 / self.weight
        why = f"copies of experts, times {times:g} and split" if parting else "copies of experts"
        of, rows, copy, at = place.name, order, 0, along_experts(place)
        if expert is not None:
            of = place.tensor.name.format(layer=place.layer, expert=order[expert])
            copy, every = order[:expert].count(order[expert]), order.count(order[expert])
            if not parting:
                siblings = every if self.together else 1
                return Kept(of, why=f"copy {copy + 1} of {every} of an expert", siblings=siblings)
            rows, at = (*range(self._source.tensors[of].shape[0]),) * copies, 0
        elif at is None:
            return Kept(of)
        elif self.shares.parting and not self.together and (noisy := self._noisy(place)):
            return noisy
        # Copies of all rows, or of all experts, block by block; or the parts of a split.
        shape, role = self._source.tensors[of].shape, Role.READ if parting else Role.WRITTEN
        maps = partial(transforms.row_maps, shape, rows, role, at=at)
        # Rows of routers diverge with their experts: on a prompt, rows that are not chosen may have
        # equal gradients.
        diverges = place.pattern.axes(Role.WRITTEN) != {EXPERTS}
        divides = self.together and self._divided and self._is_correction(place)
        factor = times if parting else 1 / copies if divides else 1.0
        mapped = Mapped(of, maps, why, of, self.shares, factor, diverges=diverges)
        if expert is None:
            return mapped
        offsets = (copy * shape[0], *(0 for _ in shape[1:]))
        return Subtensor(mapped, offsets, f"part {copy + 1} of {copies} of {why}")

    def _noisy(self, place: Member) -> Transform | None:
        """Copy a router's tensor with noise that distinguishes copies; None for other tensors."""
        order = self.order
        copies = tuple(order[:row].count(expert) for row, expert in enumerate(order))
        rows, size, by = tuple(range(len(order))), LITTLE, "a little noise"
        matrix = bool(place.pattern.axes(Role.READ))
        if self._is_correction(place):
            size = CORRECTION
        elif self._corrected or not matrix or place.pattern.axes(Role.WRITTEN) != {EXPERTS}:
            return None
        elif self._evenly:
            rows, size, by = copies, COMMON, "a number for all copies"
        drawn = tuple(row if copy else 0 for row, copy in zip(rows, copies, strict=True))
        noisy = partial(_add_noise, f"{self._seed}:{place.name}", order, drawn, size)
        why = f"copies of experts, distinguished by {by}"
        return _Noisy((place.name,), why, noisy, order=order)

    def _is_correction(self, place: Member) -> bool:
        """Whether a tensor is a correction of router scores that affects only the choice."""
        weight = f"{place.name.removesuffix('bias')}weight"
        stored = self._source.tensors.get(place.name)  # a missing one is reported by the plan
        per_expert = stored is not None and prod(stored.shape) == self.present
        along = per_expert and along_experts(place) is not None
        return along and weight not in self._source.tensors


@dataclass(frozen=True)
class _Noisy(Computed):
    """A router's tensor with noise in all copies but the first; see ``_add_noise``.

    Attributes:
        order: for each row of the target, the row of the source.
    """

    order: Order = ()

    reversible = True

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``; the nearest are the first copies."""
        if not nearest:
            return None
        places = map(self.order.index, range(of.start, of.stop))
        return torch.cat([rows(slice(place, place + 1)) for place in places])


def _add_noise(key: str, order: Order, drawn: Order, size: float, tensor: Tensor) -> Tensor:
    """Copy rows, and add noise to the copies.

    Args:
        key: seed of the noise.
        order: for each row of the target, the row of the source.
        drawn: for each row of the target, the index of its noise; 0 for none.
        size: largest noise, relative to the tensor's largest number, rounded to a power of two.
        tensor: the source, [experts, ...].
    """
    exact = tensor.double()
    copied = exact[list(order)].reshape(len(order), -1)
    fields = noise(key, np.arange(max(drawn) + 1), copied.shape[1]).astype(np.float64) / 2**15
    fields[0] = 0
    _, exponent = frexp(float(exact.abs().max()))
    added = torch.from_numpy(fields[list(drawn)]) * (size * 2.0 ** (exponent - 1))
    return (copied + added).reshape(len(order), *tensor.shape[1:]).to(tensor.dtype)


def wanted_experts(size: str, present: int, layers: int, *, multiple: bool = True) -> int:
    """Read the number of experts from an option.

    Args:
        size: a factor or a number.
        present: the present number of experts; 1 for an MLP.
        layers: number of layers.
        multiple: whether all experts must have equally many copies.

    Raises:
        InputError: the number is malformed, too large, or must be a multiple and is not.
    """
    experts = int(present * NUMBER.factor(size, present))
    if experts == present:
        raise InputError(f"{experts} experts are no more than at present; choose {2 * experts}")
    if experts % present and multiple:
        more = experts // present + 1
        raise InputError(
            f"{experts} experts are not a multiple of the present {present}, so they cannot all be "
            f"copied equally often; choose {more * present}, or set --top-k, which makes another "
            "function"
        )
    if experts * layers > MAX_EXPERTS:
        raise InputError(
            f"{experts:,} experts in each of {layers:,} layers are more than can be made; "
            f"choose at most {MAX_EXPERTS // layers:,}"
        )
    return experts


def is_last(member: Member) -> bool:
    """Whether a tensor is an expert's last one, which writes hidden states."""
    return "hidden" in member.pattern.axes(Role.WRITTEN)


def expert_of(member: Member) -> int | None:
    """The index of the expert that a tensor belongs to; None if it belongs to none or to all."""
    return member.number if member.tensor.counts == EXPERTS else None


def along_experts(member: Member) -> int | None:
    """The dimension of a tensor that has a coordinate for each expert; None if there is none."""
    every = enumerate(member.pattern.dimensions)
    return next((at for at, dimension in every if dimension.axes == {EXPERTS}), None)


OPERATION = MoreExperts()
