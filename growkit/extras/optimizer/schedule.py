"""Schedules of learning rates, for an optimizer whose groups were split and scaled.

Schedulers of torch and transformers save lists with a number for every group, and numbers that all
groups share. A shared learning rate can be scaled only if all groups have the same factor.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from growkit.base.errors import InputError
from growkit.extras.optimizer.param_groups import ParamGroup
from growkit.extras.optimizer.state import is_number

RATES = frozenset({"base_lrs", "_last_lr", "_init_lrs", "min_lrs", "max_lrs"})
"""Lists of learning rates, one for every group."""

GROUP_KEYS = RATES | {"lr_lambdas", "base_momentums", "max_momentums"}
"""Lists with one entry per group."""

FLOOR = "eta_min"
"""The final rate of a cosine, which all groups share."""

SMALLEST_CHANGE, NEGLIGIBLE = "eps", 1e-8
"""The smallest change of a rate, which is ignored; and its default, which has no effect."""

FALLBACK = "default_min_lr"
"""The rate that torch uses for every group if ``min_lrs`` does not fit the groups."""

INNER = "_schedulers"

RELATIVE = frozenset(
    {
        *("factor", "start_factor", "end_factor", "gamma", "power", "threshold"),
        *("best", "mode_worse", "total_size", "step_ratio", "_schedule_phases"),
        *("lr_lambdas", "base_momentums", "max_momentums", "_scale_fn_custom", "_streaming_avg"),
    }
)
"""Fractional numbers that are not rates: factors, losses, positions in a cycle."""

REMEDY = (
    "give the optimizer's state without the schedule and make a new schedule, with its rates "
    "multiplied like those of the groups"
)


def is_schedule(content: Mapping[Any, Any]) -> bool:
    """Whether a mapping is the state of a scheduler: it has rates of groups."""
    return not RATES.isdisjoint(content)


def holds_schedule(content: Any) -> bool:
    """Whether there is a schedule anywhere in some content."""
    if isinstance(content, dict):
        return is_schedule(content) or any(map(holds_schedule, content.values()))
    return isinstance(content, list | tuple) and any(map(holds_schedule, content))


def grown_schedule(content: Any, where: str, groups: int, grown: Sequence[ParamGroup]) -> Any:
    """Convert the schedules in some content to the new groups.

    Args:
        content: the saved content, e.g. ``scheduler.state_dict()``.
        where: its file or folder.
        groups: number of groups before.
        grown: the new groups.

    Raises:
        InputError: a schedule has a rate that cannot be scaled, or belongs to other groups.
    """
    if isinstance(content, dict):
        converted = copy(content)  # it may be a Counter
        strict = is_schedule(content)
        for key, value in content.items():
            if strict and key != INNER:
                converted[key] = _grown(key, value, where, groups, grown)
            else:
                converted[key] = grown_schedule(value, where, groups, grown)
        return converted
    if isinstance(content, list | tuple):
        return type(content)(grown_schedule(entry, where, groups, grown) for entry in content)
    return content


def _grown(key: str, value: Any, where: str, groups: int, grown: Sequence[ParamGroup]) -> Any:
    """Convert an entry of a schedule."""
    scales = sorted({group.rate for group in grown})
    if key in GROUP_KEYS:
        values = _of_groups(key, value, where, groups)
        return [
            values[group.origin] * group.rate if key in RATES else values[group.origin]
            for group in grown
        ]
    if scales == [1.0]:
        return value
    if key == FALLBACK:
        return None  # so that torch refuses other groups and does not give one rate to all
    shown = str(value)[:40]
    if key in (FLOOR, SMALLEST_CHANGE) and is_number(value):
        # A negligible change must stay negligible for the smallest rate, so that every
        # group moves when its source does.
        negligible = value == 0 or (key == SMALLEST_CHANGE and value <= NEGLIGIBLE)
        if negligible or len(scales) == 1:
            return value * scales[0]
        raise InputError(
            f"{where} has a schedule with {key} = {shown}, one rate for all groups, but the rates "
            f"of the grown model's groups are multiplied by {scales[0]:g} to {scales[-1]:g}; "
            f"{REMEDY}"
        )
    if key in RELATIVE or not _has_fraction(value):
        return value
    raise InputError(
        f"{where} has a schedule with {key} = {shown}, which no scheduler of torch or "
        f"transformers has, so growkit cannot tell whether it is a rate; {REMEDY}"
    )


def _of_groups(key: str, value: Any, where: str, groups: int) -> Sequence[Any]:
    """Check a list with one entry per group.

    Raises:
        InputError: it is not such a list.
    """
    if isinstance(value, list | tuple) and (key not in RATES or all(map(is_number, value))):
        if len(value) == groups:
            return value
        if value and all(entry == value[0] for entry in value):
            return [value[0]] * groups
    raise InputError(
        f"{where} has a schedule with {key} = {str(value)[:40]}, where a list for the {groups} "
        f"groups of the optimizer was expected; save both again, or {REMEDY}"
    )


def _has_fraction(value: Any) -> bool:
    """Whether a value contains a float, which cannot be a number of steps."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_fraction, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and value != 0
