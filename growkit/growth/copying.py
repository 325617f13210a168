"""Growth by copies: from the sizes that people ask for to plans.

Shared by all methods that grow by choosing copies (``growkit.algebra.law``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from growkit.algebra.axes import Role
from growkit.algebra.shares import LEAST_SNR_DB, Shares
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config, TensorInfo, Weights
from growkit.families.family import Family, stored_family
from growkit.growth.expanding import expand
from growkit.growth.placing import placed_copies
from growkit.growth.sizes import check_whole, factor
from growkit.growth.vocabulary import NEW_TOKENS, VOCAB, with_vocabulary
from growkit.planning.operation import Change, Option, Row, SizeOption, Switch, Value
from growkit.planning.plan import Plan, Planned, Rule, taken_over, unused_tensors
from growkit.planning.transforms import Kept

UNTIE = Switch("untie", "give a model whose output head is its embedding a separate head")


def untied(source: Weights, options: Mapping[str, str]) -> Plan | None:
    """Plan the head, if it is asked for.

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
    dropped, duplicates = unused_tensors(source, family)
    before = family.patterns(source.config)
    config = {**source.config, "tie_word_embeddings": False}
    after = family.patterns(config)
    sizes = family.sizes(config)
    (embedding,) = (name for name, each in before.items() if "vocab" in each.axes(Role.READ))
    rules = []
    for name, pattern in after.items():
        info = TensorInfo(pattern.shape(sizes), source.tensors[embedding].dtype)
        if name in before:
            rules.append(taken_over(name, source.tensors[name]))
        else:
            rules.append(Rule(name, info, Kept(embedding, why="the embedding, as it is")))
    plan = Plan(config, tuple(rules), {}, dropped=dropped, duplicates=duplicates)
    plan.check(source, after, sizes)
    return plan


DEFAULT_SNR_DB = 10.0
MOST_SNR_DB = 300


def _is_snr(text: str) -> bool:
    try:
        snr_db = float(text)
    except ValueError:
        raise InputError(f"snr_db {text!r} is not a number of decibels") from None
    if not LEAST_SNR_DB <= snr_db <= MOST_SNR_DB:
        raise InputError(
            f"snr_db {text} is out of range; exact splits exist from 4.78 dB upwards, "
            f"and beyond {MOST_SNR_DB} dB there is no noise left"
        )
    return True


SYMMETRY = Option(
    "symmetry",
    "how weights are split among copies: at random (break), so that copies can diverge in "
    "training; evenly (keep), as HyperCloning was published, so that they stay equal; or in fixed "
    "shares of 1, 3, 5 and so on (uneven), so that they diverge in the same way in every run",
    ("break", "keep", "uneven"),
    kinds=(str,),
)
MOMENTS = Option(
    "moments",
    "what an optimizer's state (--optimizer) starts with for copies: the moments of what they copy "
    "(copy), or, for all but the first, none (reset), so that even copies diverge too",
    ("copy", "reset"),
    kinds=(str,),
)
GROUPS = Option(
    "groups",
    "what a copy of a KV head serves: copies of its whole group (whole), so that all of its copies "
    "train alike, or of a part of the group (part), so that they diverge; auto is whole with "
    "--symmetry keep",
    ("auto", "whole", "part"),
    kinds=(str,),
)
PROMISE = Option(
    "promise",
    "what may happen to the function: nothing (exact); or, for a size that cannot be had "
    "otherwise, one rounding of some tensors (bounded)",
    ("exact", "bounded"),
    kinds=(str,),
)
SNR_DB = Option(
    "snr_db",
    "how even random splits are, as a signal-to-noise ratio in dB: the higher, the more alike the "
    f"parts; {DEFAULT_SNR_DB:g} by default",
    form="DB",
    accepts=_is_snr,
    kinds=(str, int, float),
)


@dataclass(frozen=True)
class CopyMethod:
    """A growth method that copies whole spaces: its sizes say which, and what follows what.

    ``needs`` names axes without which the method makes no sense.
    """

    name: str
    paper: str
    sizes: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``growkit.planning.operation.Operation``."""
        return (*self.sizes, VOCAB, NEW_TOKENS, UNTIE, PROMISE, SYMMETRY, GROUPS, SNR_DB, MOMENTS)

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``growkit.planning.operation.Operation``."""
        old = family.sizes(config)
        if not old.get("noise_heads"):
            return True  # nothing that the DIFF Transformer could do for it
        return family.expresses(config, {**old, **self.grown(family, config, options)})

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """See ``growkit.planning.operation.Operation``."""
        return as_factors(family, config, self.sizes, options)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        snr_db = float(options.get("snr_db", DEFAULT_SNR_DB))
        symmetry = options["symmetry"]
        shares = Shares(snr_db if symmetry == "break" else None, seed, symmetry == "uneven")
        groups = options.get("groups", "auto")
        if groups == "auto" and not shares.parting:
            groups = "whole"
        settled: dict[str, Value | None] = {
            "groups": None if groups == "auto" else groups,
            "symmetry": symmetry,
            "snr_db": shares.snr_db,
            "moments": "reset" if options.get("moments") == "reset" else None,
            "new_tokens": options["new_tokens"] if "vocab" in options else None,
        }
        plans: list[Plan] = []
        lost: list[str] = []
        for prepare in (untied, with_vocabulary):
            plan = prepare(source, options)
            if plan:
                lost += [plan.lost] if plan.lost else []
                plans.append(plan)
                source = Planned(source, plan)
        plan = self._plan(source, options, shares)
        plans += [plan] if plan else []
        if not plans:
            names = ", ".join("--" + option.name.replace("_", "-") for option in self.sizes)
            raise InputError(f"nothing would grow; give at least one of {names} a factor like x2")
        if plan and plan.recomputed_sources:
            lost.append(rounded_by(plan))
            return Change(plans, "bounded", "; ".join(lost), settled, by_rounding=True)
        return Change(plans, "exact", "; ".join(lost), settled)

    def _plan(self, source: Weights, options: Mapping[str, str], shares: Shares) -> Plan | None:
        """What copies, if anything does."""
        family = stored_family(source)
        old = family.sizes(source.config)
        for axis in self.needs:
            if not old.get(axis):
                raise InputError(
                    f"{self.name} grows models with {axis}, but {source.where()} is a "
                    f"{family.name} model without; choose another method"
                )
        grown = self.grown(family, source.config, options)
        if not grown:
            return None
        groups = options.get("groups", "auto")
        whole = groups == "whole" or (groups == "auto" and not shares.parting)
        expansions = partial(placed_copies, family, source.config, old, grown, whole_groups=whole)
        rounding = options.get("promise") == "bounded"
        resets = options.get("moments") == "reset"
        return expand(source, family, grown, expansions, shares, rounding=rounding, resets=resets)

    def grown(self, family: Family, config: Config, options: Mapping[str, str]) -> dict[str, int]:
        """The new size of every axis that grows.

        Raises:
            InputError: a size cannot be had.
        """
        present = family.sizes(config)
        ratios: dict[str, Fraction] = {}
        grown: dict[str, int] = {}
        for option in self.sizes:
            axes = _axes(family, present, option)
            size = options.get(option.name)
            ratio = ratios[option.follows] if option.follows else Fraction(1)
            if size is not None:
                if not axes:
                    raise InputError(f"a {family.name} model has no {option.name} to grow")
                current = _current_size(family, config, option, axes)
                ratio = factor(option.name, size, current)
                named = {axis: present[axis] * ratio for axis in axes if axis in option.axes}
                check_whole(option.name, size, named)
            # What follows stays where that would make it no whole number.
            sizes = {axis: present[axis] * ratio for axis in axes}
            whole = {axis: int(new) for axis, new in sizes.items() if new.denominator == 1}
            grown |= {axis: new for axis, new in whole.items() if new != present[axis]}
            ratios[option.name] = ratio if len(whole) == len(axes) else Fraction(1)
        return grown


def rounded_by(plan: Plan) -> str:
    """What a plan rounds, in words."""
    names = list(plan.recomputed_sources)
    tensors = f"{len(names)} tensors" if len(names) > 1 else "a tensor"
    return f"one rounding of every element of {tensors} (first {names[0]})"


def as_factors(
    family: Family,
    config: Config,
    sizes: Sequence[SizeOption],
    options: Mapping[str, str],
) -> dict[str, str]:
    """Sizes in a family's own numbers as factors, which mean the same in every family.

    Sizes of what the family does not have, or that are no multiples, stay as they are.
    """
    present = family.sizes(config)
    factors = dict(options)
    for option in sizes:
        axes = _axes(family, present, option)
        if option.name in options and axes:
            with suppress(InputError):
                current = _current_size(family, config, option, axes)
                factors[option.name] = f"x{factor(option.name, options[option.name], current)}"
    return factors


def _axes(family: Family, present: Mapping[str, int], option: SizeOption) -> list[str]:
    """The axes of a model that an option grows: those it names, and those that grow with them."""
    return [axis for axis in present if family.kinds.get(axis, axis) in option.axes]


def _current_size(family: Family, config: Config, option: SizeOption, axes: list[str]) -> int:
    """A size in the config's own units: DiffLlama's heads are signal and noise heads together.

    Where experts are as wide as they like, it is that of what the option names.
    """
    axes = [axis for axis in axes if axis in option.axes] or axes[:1]
    complete = family.complete(config)
    sizes = family.sizes(config)
    for key, parts in family.axes_of(complete).items():
        if set(parts) == set(axes):
            return int(complete[key])
    distinct = [axis for axis in axes if axis not in family.same]
    return sum(sizes[axis] for axis in distinct or axes)
