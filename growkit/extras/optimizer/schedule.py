"""Schedules of learning rates, for an optimizer whose groups were split and scaled.

``LambdaLR``, of which torchtitan's schedule and most of transformers' are, saves a rate for every
group, and no other. Other schedulers may save rates under any name; they are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from growkit.base.errors import InputError
from growkit.extras.optimizer.param_groups import ParamGroup
from growkit.extras.optimizer.state import is_number

RATES = frozenset({"base_lrs", "_last_lr"})
"""Lists of learning rates, one for every group."""

GROUP_KEYS = RATES | {"lr_lambdas"}
"""Lists with one entry per group."""

KNOWN = GROUP_KEYS | {
    *("last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step"),
}
"""Keys of ``LambdaLR``, in any version of torch."""

LEFT = "left: its rates are not those of a LambdaLR; make it again, with the rates of the groups"
"""Action for any other schedule."""


def is_schedule(content: Mapping[Any, Any]) -> bool:
    """Whether a mapping is the state of a scheduler: it has rates of groups."""
    return not RATES.isdisjoint(content)


def read_schedule(content: Any, where: str, groups: int) -> dict[str, Any] | None:
    """The state of a ``LambdaLR``, with one entry per group in its lists; None for anything else.

    Args:
        content: ``scheduler.state_dict()``.
        where: its place in messages.
        groups: number of groups.

    Raises:
        InputError: it belongs to other groups.
    """
    if not isinstance(content, dict) or not RATES <= content.keys() <= KNOWN:
        return None
    lists = {key: content[key] for key in GROUP_KEYS & content.keys()}
    for key, values in lists.items():
        fits = isinstance(values, list) and (key not in RATES or all(map(is_number, values)))
        if fits and values and all(value == values[0] for value in values):
            lists[key] = values[:1] * groups
        elif not fits or len(values) != groups:
            raise InputError(
                f"{where} has a schedule with {key} = {str(values)[:40]}, where a list for the "
                f"{groups} groups of the optimizer was expected; save both again, or give the "
                "optimizer's state without the schedule"
            )
    return content | lists


def grown_schedule(content: Mapping[str, Any], grown: Sequence[ParamGroup]) -> dict[str, Any]:
    """Convert a schedule to the new groups.

    Args:
        content: the schedule; see ``read_schedule``.
        grown: the new groups.
    """
    converted = dict(content)
    for key in GROUP_KEYS & content.keys():
        pairs = [(content[key][group.origin], group.rate) for group in grown]
        converted[key] = [value * rate if key in RATES else value for value, rate in pairs]
    return converted
