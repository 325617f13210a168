"""The schedule of a learning rate, for an optimizer whose groups were split and scaled.

Schedulers of torch and transformers save a list with a number for every group, and numbers that all
groups share. Of the latter, those that are learning rates can only be scaled if all groups are
scaled alike.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from growkit.base.errors import InputError
from growkit.optimizer.groups import ParamGroup
from growkit.optimizer.state import is_number

RATES = frozenset({"base_lrs", "_last_lr", "_init_lrs", "min_lrs", "max_lrs"})
"""Lists of learning rates, one for every group."""

OF_GROUPS = RATES | {"lr_lambdas", "base_momentums", "max_momentums"}
"""Lists with an entry for every group."""

FLOOR = "eta_min"
"""The rate to which a cosine falls, which all groups share."""

SMALLEST_CHANGE, NEGLIGIBLE = "eps", 1e-8
"""Changes of a rate up to this are left out; the default, at which they make no difference."""

FALLBACK = "default_min_lr"
"""What torch takes for every group where ``min_lrs`` does not fit the groups."""

INNER = "_schedulers"

RELATIVE = frozenset(
    {
        *("factor", "start_factor", "end_factor", "gamma", "power", "threshold"),
        *("best", "mode_worse", "total_size", "step_ratio", "_schedule_phases"),
        *("lr_lambdas", "base_momentums", "max_momentums", "_scale_fn_custom", "_streaming_avg"),
    }
)
"""Numbers with a fraction that are no rates: factors, losses, places in a cycle."""

REMEDY = (
    "give the optimizer's state without the schedule and make a new one, with rates that are "
    "multiplied as those of the groups"
)


def is_schedule(content: Mapping[Any, Any]) -> bool:
    """Whether this is what a scheduler saved: it has rates of groups."""
    return not RATES.isdisjoint(content)


def holds_schedule(content: Any) -> bool:
    """Whether there is a schedule in it anywhere."""
    if isinstance(content, dict):
        return is_schedule(content) or any(map(holds_schedule, content.values()))
    return isinstance(content, list | tuple) and any(map(holds_schedule, content))


def grown_schedule(content: Any, where: str, groups: int, grown: Sequence[ParamGroup]) -> Any:
    """The same content, in which every schedule has an entry for each of the new groups.

    Args:
        content: what was saved, e.g. ``scheduler.state_dict()``.
        where: the file or folder that it comes from.
        groups: the number of groups that it was made for.
        grown: the new groups.

    Raises:
        InputError: a schedule has a rate that cannot be scaled, or is of other groups.
    """
    if isinstance(content, dict):
        made = copy(content)  # which may be a Counter
        strict = is_schedule(content)
        for key, value in content.items():
            if strict and key != INNER:
                made[key] = _grown(key, value, where, groups, grown)
            else:
                made[key] = grown_schedule(value, where, groups, grown)
        return made
    if isinstance(content, list | tuple):
        return type(content)(grown_schedule(each, where, groups, grown) for each in content)
    return content


def _grown(key: str, value: Any, where: str, groups: int, grown: Sequence[ParamGroup]) -> Any:
    """An entry of a schedule."""
    scales = sorted({each.rate for each in grown})
    if key in OF_GROUPS:
        values = _of_groups(key, value, where, groups)
        return [
            values[each.origin] * each.rate if key in RATES else values[each.origin]
            for each in grown
        ]
    if scales == [1.0]:
        return value
    if key == FALLBACK:
        return None  # so that torch refuses other groups rather than give all of them one rate
    shown = str(value)[:40]
    if key in (FLOOR, SMALLEST_CHANGE) and is_number(value):
        # A negligible change stays so for the smallest rate: no group stays where its source moves.
        negligible = value == 0 or (key == SMALLEST_CHANGE and value <= NEGLIGIBLE)
        if negligible or len(scales) == 1:
            return value * scales[0]
        raise InputError(
            f"{where} has a schedule with {key} = {shown}, one rate for all groups, and "
            f"those of the grown model are multiplied by {scales[0]:g} to {scales[-1]:g}; {REMEDY}"
        )
    if key in RELATIVE or not _has_fraction(value):
        return value
    raise InputError(
        f"{where} has a schedule with {key} = {shown}, which no scheduler of torch or "
        f"transformers has, so growkit cannot tell whether it is a rate; {REMEDY}"
    )


def _of_groups(key: str, value: Any, where: str, groups: int) -> Sequence[Any]:
    """A list with an entry for every group.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, list | tuple) and (key not in RATES or all(map(is_number, value))):
        if len(value) == groups:
            return value
        if value and all(each == value[0] for each in value):
            return [value[0]] * groups
    raise InputError(
        f"{where} has a schedule with {key} = {str(value)[:40]}, where a list for the {groups} "
        f"groups of the optimizer was expected; save both again, or {REMEDY}"
    )


def _has_fraction(value: Any) -> bool:
    """Whether there is a number in it that counts no steps."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_fraction, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and value != 0
