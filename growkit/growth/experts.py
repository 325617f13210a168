"""More experts: those of a model are copied, with their rows of the router.

Every expert gets c copies, and a token goes through c times as many. Copies get the same number, so
that the c·k largest belong to the k experts that were chosen before, each with all of its copies.
Together these weigh what the expert weighed:

- softmax over the chosen: w_i = exp l_i / Σ_chosen exp l_j. The sum has every term c times, a copy
  weighs w_i / c, and c copies w_i.
- softmax over all experts before some are chosen: likewise, with the sum over all.
- a sigmoid of each number, divided by the sum of the chosen: likewise. Without that division a copy
  weighs what the expert weighed, and what all weights are multiplied by is divided by c.
- groups, some of them chosen first: copies come in blocks, so that whole groups are copied,
  and c times as many are chosen.

Copies that are the same stay the same. As they are chosen together with equal weights, their last
matrices may be c times any parts that sum to the expert's: exact random splits let them part.

With as many per token as before, more experts cost no more (Dwivedi et al., "Expert Upcycling",
arXiv 2604.19835). Copies with equal numbers would share the k places, and leave k/c experts; so the
router tells copies of an expert apart:

- A softmax stays the same if one number is added to all of its numbers. That of the second copy of
  every expert is v·x larger, with a random v, of the third one u·x. Where these differ by more than
  the first of the k experts from the last, all k are of one copy, and compute what they did. Tokens
  divide by the sign of v·x, and the copies part. Where all experts share one softmax, the others
  keep what little it gives to them.
- A sigmoid does not stay the same. If a router adds corrections to it for the choice alone, little
  noise in these decides between copies. Where a token uses one group, copies are in groups of their
  own, and any of them computes what the one group did.
- Where some experts get more copies than others, such as those that a text uses most, no number
  fits all. Copies share the places, and little noise in their rows lets them part.
"""

import re
from collections.abc import Mapping
from functools import partial
from math import frexp

from growkit.algebra.axes import Role
from growkit.algebra.splits import noise
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import Weights
from growkit.families.description import MOST_EXPERTS, Member
from growkit.families.family import Family, stored_family
from growkit.growth.copying import SNR_DB, SYMMETRY, shares_of
from growkit.growth.expert_use import copies_by_use
from growkit.planning import transforms
from growkit.planning.operation import Change, Operation, Option, SizeOption, Value
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Computed, Kept, Mapped, Section, Transform

EXPERTS = "experts"
"""The axis of experts."""

Order = tuple[int, ...]
"""For every expert of a layer the one that it copies: all first copies, all second ones, ..."""


def is_count(text: str) -> bool:
    """Whether a text is a positive number of things."""
    return bool(re.fullmatch(r"[1-9][0-9]{0,5}", text))


def _are_counts(text: str) -> bool:
    return all(is_count(each) for layer in text.split("/") for each in layer.split(","))


NUMBER = SizeOption(
    EXPERTS,
    "how many experts each layer gets; under experts a multiple of those there are, or any larger "
    "number with --top-k",
    axes=(EXPERTS,),
    needed=True,
)
TOP_K = Option(
    "top_k",
    "experts that a token goes through; by default two groups of pieces under upcycle; under "
    "experts, multiplied by the same factor",
    form="N",
    accepts=is_count,
)
COPIES = Option(
    "copies",
    "how often each expert is there, in all layers or, with / between them, in each; as evenly as "
    "possible by default",
    form="N,N,…",
    accepts=_are_counts,
)
USE = Option(
    "calibration", "a UTF-8 text; the experts that it uses most get the most copies", form="TEXT"
)


class MoreExperts(Operation):
    """Copies experts."""

    name = "experts"
    paper = "https://arxiv.org/abs/2604.19835"
    options: tuple[Option, ...] = (NUMBER, TOP_K, COPIES, USE, SYMMETRY, SNR_DB)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family = stored_family(source)
        made = _Copying(source, family, options, seed)
        unused = unused_tensors(source, family)
        orders = made.orders(options)
        plan = Plan.checked(
            source,
            family,
            made.config,
            {each.name: made.copied(each, orders.get(each.layer, ())) for each in made.places},
            unused=unused,
            copies={EXPERTS: max(order.count(0) for order in orders.values())},
            apart="" if made.together else "copies of an expert train on tokens of their own",
        )
        settled: dict[str, Value | None] = {"symmetry": options["symmetry"]}
        settled |= {"snr_db": made.shares.snr_db, USE.name: None}
        if USE.name in options:
            counts = (map(order.count, range(made.present)) for order in orders.values())
            settled[COPIES.name] = "/".join(",".join(map(str, each)) for each in counts)
        return Change([plan], *made.promise, settled)


COMMON = 16.0
"""What tells copies of all experts apart, relative to the largest number of the router's rows."""

LITTLE = 2.0**-6
"""What tells single rows apart, likewise."""

CORRECTION = 2.0**-20
"""What tells corrections apart: more than float32 rounds, less than what experts differ by."""


class _Copying:
    """How a model with more experts is made.

    Args:
        source: the model with fewer.
        family: of both.
        options: those of ``MoreExperts``.
        seed: of what tells copies apart.

    Attributes:
        present: number of experts in the source.
        config: of the target.
        places: all tensors of the target.
        together: whether all copies of what is chosen are chosen.
        shares: of the last matrices; and whether anything tells copies apart.

    Raises:
        InputError: it cannot be had, or the model does not say how many experts a token goes
            through.
    """

    def __init__(
        self, source: Weights, family: Family, options: Mapping[str, str], seed: int
    ) -> None:
        experts = family.experts
        if experts is None:
            raise InputError(
                f"{source.where()} has no experts to copy; --method upcycle makes some"
            )
        complete, sizes = family.complete(source.config), family.sizes(source.config)
        self._source, self._seed, self.shares = source, seed, shares_of(options, seed)
        self.present, top_k = sizes[EXPERTS], options.get("top_k")
        if top_k is None and (given := {COPIES.name, USE.name} & options.keys()):
            raise InputError(f"{min(given)} goes with top_k, as copies share what a token uses")
        self.count = wanted_experts(
            options[EXPERTS], self.present, sizes["layers"], multiple=top_k is None
        )
        copies, rest = divmod(self.count, self.present)
        self._evenly = not rest and not {COPIES.name, USE.name} & options.keys()
        self.config = dict(family.resized(source.config, sizes | {EXPERTS: self.count}))
        chosen = complete.get(experts.top_k)
        if not isinstance(chosen, int) or not 1 <= chosen <= self.present:
            raise InputError(
                f"config.json in {source.where()} has {experts.top_k} {chosen!r}; a number from 1 "
                f"to {self.present} was expected"
            )
        self.top_k = self.config[experts.top_k] = int(top_k) if top_k else copies * chosen
        if self.top_k > self.count:
            raise InputError(
                f"top_k {top_k} of {self.count} experts cannot be chosen; leave it out"
            )
        self.together = self._evenly and self.top_k == copies * chosen
        groups = [key for key in experts.groups if isinstance(complete.get(key), int)]
        if not self._evenly and any(complete[key] > 1 for key in groups):
            raise InputError(
                f"experts of {source.where()} are in groups of equal size, so that all need as "
                f"many copies; choose {(copies + 1) * self.present} experts"
            )
        for key in groups if self.together else groups[: self._evenly]:
            self.config[key] = copies * complete[key]
        self._one_group = self._evenly and [complete[key] for key in groups[1:]] == [1]
        if self.together and experts.alone(complete):
            assert experts.scaling
            self.config[experts.scaling] = complete[experts.scaling] / copies
        if self.together and self.shares.parting and copies & (copies - 1):
            raise InputError(
                f"{copies} copies of an expert part exactly only if their number is a power of "
                "two; choose one, or --symmetry keep for copies that stay the same"
            )
        self.places = family.members(self.config)
        self._corrected = any(map(self._is_correction, self.places))

    @property
    def promise(self) -> tuple[str, str]:
        """What is kept of the function, and what is lost."""
        if self.together:
            return "exact", ""
        if not (self._one_group and self._corrected):
            return "different", (
                f"a token goes through {self.top_k} of {self.count} experts, and may meet copies "
                "of one in the place of others"
            )
        if not self.shares.parting:
            return "exact", ""
        return "bounded", "experts that the router tells apart by less than 1e-6 may be exchanged"

    def orders(self, options: Mapping[str, str]) -> dict[int | None, Order]:
        """The order of every layer with experts.

        Raises:
            InputError: there are no such layers, the copies asked for do not fit, or the text
                cannot be used.
        """
        with_experts = (p for p in self.places if expert_of(p) is not None or _of_all_experts(p))
        layers = sorted({place.layer for place in with_experts if place.layer is not None})
        if not layers:
            raise InputError(f"no layer of {self._source.where()} has experts to copy")
        whole, more = divmod(self.count, self.present)
        counts = [[whole + (expert < more) for expert in range(self.present)]]
        if USE.name in options:
            counts = copies_by_use(self._source, options[USE.name], self.present, self.count)
        elif COPIES.name in options:
            counts = [[*map(int, each.split(","))] for each in options[COPIES.name].split("/")]
        counts *= len(layers) if len(counts) == 1 else 1
        if len(counts) != len(layers) or any(
            (len(each), sum(each)) != (self.present, self.count) for each in counts
        ):
            raise InputError(
                f"copies {options[COPIES.name]} do not fit; {self.present} numbers with the sum "
                f"{self.count} were expected, once or for each of {len(layers)} layers"
            )
        return {
            layer: tuple(e for c in range(max(each)) for e, n in enumerate(each) if n > c)
            for layer, each in zip(layers, counts, strict=True)
        }

    def copied(self, place: Member, order: Order) -> Transform:
        """How a tensor is made.

        Args:
            place: the tensor.
            order: of its layer; empty without experts.
        """
        parting, expert = self.together and self.shares.parting and is_last(place), expert_of(place)
        copies = self.count // self.present
        why = f"copies of experts, times {copies} and split" if parting else "copies of experts"
        of, rows, copy = place.name, order, 0
        if expert is not None:
            of = place.tensor.name.format(layer=place.layer, expert=order[expert])
            copy, every = order[:expert].count(order[expert]), order.count(order[expert])
            if not parting:
                siblings = every if self.together else 1
                return Kept(of, why=f"copy {copy + 1} of {every} of an expert", siblings=siblings)
            rows = (*range(self._source.tensors[of].shape[0]),) * copies
        elif not _of_all_experts(place):
            return Kept(of)
        elif self.shares.parting and not self.together and (apart := self._apart(place, order)):
            return apart
        # Copies of all rows, or experts, in blocks: the same again, or parts of one.
        shape, role = self._source.tensors[of].shape, Role.READ if parting else Role.WRITTEN
        maps = partial(transforms.row_maps, shape, rows, role, uneven=self.shares.uneven)
        # Rows of routers part with the experts that they belong to: one that is not chosen on a
        # prompt may have the gradient of its copies there.
        diverges = place.pattern.axes(Role.WRITTEN) != {EXPERTS}
        whole = Mapped(
            of, maps, why, of, self.shares, copies if parting else 1.0, diverges=diverges
        )
        if expert is None:
            return whole
        begin = (copy * shape[0], *(0 for _ in shape[1:]))
        return Section(whole, begin, f"part {copy + 1} of {copies} of {why}")

    def _apart(self, place: Member, order: Order) -> Transform | None:
        """A tensor of a router that tells copies apart; None for one that does not."""
        copies = tuple(order[:row].count(expert) for row, expert in enumerate(order))
        rows, size, by = tuple(range(len(order))), LITTLE, "a little noise"
        if self._is_correction(place):
            size = CORRECTION
        elif self._corrected or not _is_router(place):
            return None
        elif self._evenly:
            rows, size, by = copies, COMMON, "a number for all copies"
        drawn = tuple(row if copy else 0 for row, copy in zip(rows, copies, strict=True))
        made = partial(_told_apart, f"{self._seed}:{place.name}", order, drawn, size)
        return Computed((place.name,), f"copies of experts, told apart by {by}", made)

    def _is_correction(self, place: Member) -> bool:
        """Whether a tensor is added to what a router gives to all experts, for the choice alone."""
        weight = f"{place.name.removesuffix('bias')}weight"
        alone = place.pattern.notation == EXPERTS
        return alone and weight not in self._source.tensors


def _told_apart(key: str, order: Order, drawn: Order, size: float, tensor: Tensor) -> Tensor:
    """Copies of rows, [experts, ...], with noise.

    Args:
        key: seeds the noise.
        order: the expert that each row copies.
        drawn: for each row the number of the noise that it gets; 0 for none.
        size: largest noise, relative to the tensor's largest number, rounded to a power of two.
        tensor: what is copied.
    """
    copied = tensor.double()[list(order)].reshape(len(order), -1)
    fields = noise(key, np.arange(max(drawn) + 1), copied.shape[1]).astype(np.float64) / 2**15
    fields[0] = 0
    _, exponent = frexp(float(tensor.abs().max()))
    added = torch.from_numpy(fields[list(drawn)]) * (size * 2.0 ** (exponent - 1))
    return (copied + added).reshape(len(order), *tensor.shape[1:]).to(tensor.dtype)


def wanted_experts(size: str, present: int, layers: int, *, multiple: bool = True) -> int:
    """The number of experts that an option asks for, before anything is made for each.

    Args:
        size: a factor or a number.
        present: the present number of experts; 1 for an MLP.
        layers: number of layers.
        multiple: whether all need equally many copies.

    Raises:
        InputError: the number is not understood, no multiple of the present one, or more than any
            model has.
    """
    experts = int(present * NUMBER.factor(size, present))
    if experts == present:
        raise InputError(f"{experts} experts are no more than there are; choose {2 * experts}")
    if experts % present and multiple:
        more = experts // present + 1
        raise InputError(
            f"{experts} experts cannot be had by copying each of the present {present} equally "
            f"often, so that all copies of what is chosen are chosen; choose {more * present}, or "
            "as many for a token as before (top_k), which is another function"
        )
    if experts * layers > MOST_EXPERTS:
        raise InputError(
            f"{experts:,} experts in each of {layers:,} layers are more than can be made; "
            f"choose at most {MOST_EXPERTS // layers:,}"
        )
    return experts


def is_last(member: Member) -> bool:
    """Whether a tensor belongs to the last step of an expert, and writes hidden states."""
    return "hidden" in member.pattern.axes(Role.WRITTEN)


def expert_of(member: Member) -> int | None:
    """Which expert a tensor belongs to; None if it is no single expert's."""
    return member.number if member.tensor.counts == EXPERTS else None


def _of_all_experts(member: Member) -> bool:
    """Whether a tensor has a row, or a matrix, for each expert."""
    return member.pattern.dimensions[0].axes == {EXPERTS}


def _is_router(member: Member) -> bool:
    """Whether a tensor is the matrix of a router."""
    pattern = member.pattern
    return pattern.axes(Role.WRITTEN) == {EXPERTS} and bool(pattern.axes(Role.READ))


OPERATION = MoreExperts()
