"""The schedule of a learning rate, for an optimizer whose groups were split and scaled."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from growkit.optimizer.groups import Group

SCALED = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs"})
"""What schedulers of torch call the rates of every group."""


def grown_schedule(schedule: Any, groups: int, grown: Sequence[Group]) -> Any:
    """What a scheduler saved, with an entry for each of the new groups.

    Args:
        schedule: ``scheduler.state_dict()``; schedules in it are treated likewise.
        groups: the number of groups that it was made for.
        grown: the new groups.
    """
    if isinstance(schedule, dict):
        made = copy(schedule)  # which may be a Counter
        for key, value in schedule.items():
            of_groups = isinstance(value, list) and len(value) == groups
            if of_groups and (key in SCALED or key == "lr_lambdas"):
                made[key] = [_scaled(value[each.origin], each.rate, key) for each in grown]
            else:
                made[key] = grown_schedule(value, groups, grown)
        return made
    if isinstance(schedule, list | tuple):
        return type(schedule)(grown_schedule(each, groups, grown) for each in schedule)
    return schedule


def _scaled(value: Any, rate: float, key: str) -> Any:
    return value * rate if key in SCALED and isinstance(value, int | float) else value
