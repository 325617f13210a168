"""The update of every tensor of a target, from its plans (``growkit.algebra.update_law``)."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from growkit.algebra.update_law import Update
from growkit.base.errors import InputError
from growkit.base.lazy import np
from growkit.base.tensors import TensorInfo
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import MANIFEST, read_manifest
from growkit.model.families.family import known_family
from growkit.model.families.family_parts import BALANCING
from growkit.model.model import Model
from growkit.planning.plan import Lineage, Plan
from growkit.results.growth_result import UpdateGroup, Updates

APART = "one tensor becomes several, which train separately"
INDEX = re.compile(r"(?<=\.)[0-9]+(?=\.)")
"""The number of a layer or an expert in the name of a tensor."""


@dataclass(frozen=True)
class Law:
    """The law of updates for a whole target.

    Attributes:
        updates: update of every tensor.
        why: the reasons why the target does not train like the source, each with the number of
            tensors and the first of them; empty if it does, except for new tensors.
    """

    updates: Mapping[str, Update]
    why: tuple[str, ...]


def other_loss(before: Model, after: Model) -> str:
    """Why the class returns another loss for the target, though its logits are the source's.

    A loss that balances experts takes its means over the routers of all layers
    (``Experts.balancing``).

    Args:
        before: the source.
        after: the target.

    Returns:
        The reason, as a sentence; empty if there is none, or no family describes the target.
    """
    if known_family(after.config, after.described) is None:
        return ""
    complete = after.family.complete(after.config)
    parts = [complete, *(part for part in complete.values() if isinstance(part, Mapping))]
    balanced = any(part[key] for part in parts for key in part if BALANCING.fullmatch(key))
    if not (balanced and complete.get("output_router_logits")):
        return ""
    one, other = map(_layers_with_experts, (before, after))
    if one == other:
        return ""
    return (
        f"its class returns another loss than the source's, as output_router_logits adds one that "
        f"balances the experts of {other} layers, of which the source has {one or 'none'}"
    )


def _layers_with_experts(model: Model) -> int:
    members = model.family.members(model.config)
    return len({member.layer for member in members if "experts" in member.tensor.pattern})


def law_of(lineage: Lineage, of_source: Law | None = None) -> Law:
    """The law for the target of a lineage.

    Args:
        lineage: how the target is made.
        of_source: law of the lineage's source, if that was grown itself: factors multiply. None to
            relate the target's updates to those of the lineage's source.
    """
    known = of_source or Law({}, ())
    current = {name: known.updates.get(name, Update()) for name in lineage.source.tensors}
    other = other_loss(lineage.source, lineage.target)
    reasons = dict.fromkeys([*known.why, *([other] if other else [])])
    for plan in lineage.plans:
        current = stepped(plan, current)
        left_out = f"{plan.left_out[0]} of the source is left out" if plan.left_out else ""
        reasons |= dict.fromkeys(filter(None, [plan.divergence, left_out]))
    by_reason: dict[str, list[str]] = {}
    for name, update in current.items():
        if update.why and not update.new:
            by_reason.setdefault(update.why, []).append(name)
    for why, names in by_reason.items():
        of = names[0] if len(names) == 1 else f"{len(names)} tensors (first {names[0]})"
        reasons[f"{of}: {why}"] = None
    if lineage.promise == "different":
        reasons["it is not the same function"] = None
    return Law(current, tuple(reasons))


def stepped(plan: Plan, before: Mapping[str, Update]) -> dict[str, Update]:
    """The updates of a plan's targets, from those of its sources."""
    updates = {}
    for rule in plan.rules:
        updates[rule.target] = rule.transform.update([before[name] for name in rule.replaced])
    rules = [rule for rule in plan.rules if not updates[rule.target].new]
    uses = Counter(name for rule in rules for name in rule.sources)
    for rule in rules:
        if any(uses[name] > rule.transform.siblings for name in rule.sources):
            updates[rule.target] = updates[rule.target].because(APART)
    return updates


def recorded_law(folder: Folder, tensors: Iterable[str]) -> Law:
    """Read the law of updates from the manifest of a grown folder.

    If rows of a tensor have different shares, all rows get the middle, which changes eps least.

    Args:
        folder: folder of a model or an adapter.
        tensors: names of all tensors in its files.

    Raises:
        InputError: the folder has no such record, or is damaged.
    """
    file, manifest = folder.path / MANIFEST, read_manifest(folder)
    by_kind: dict[str, Update] = {}
    try:
        for group in manifest["updates"]["groups"]:
            lr, n_in, *n_out = map(float, (group["lr"], group["n_in"], *group["n_out"]))
            if not all(0 < number < math.inf for number in (lr, n_in, *n_out)):
                raise ValueError
            shares, new = np.asarray((min(n_out) + max(n_out)) / 2), bool(group.get("new"))
            together = max(1, int(group.get("together", 1)))
            update = Update(n_in, shares, lr * n_in, new, together=together)
            by_kind |= dict.fromkeys(map(str, group["tensors"]), update)
        why = tuple(map(str, manifest["updates"]["why"]))
    except (TypeError, KeyError, ValueError):
        raise InputError(
            f"'updates' in {file} is not what growkit writes; make the model again with "
            f"'growkit run {file}'"
        ) from None
    updates = {}
    for name in tensors:
        update_of = by_kind.get(name) or by_kind.get(INDEX.sub("*", name))
        if update_of is None:
            raise InputError(
                f"{file} does not mention tensor {name}; the files in {folder} are not the ones "
                "that growkit wrote"
            )
        updates[name] = update_of
    return Law(updates, why)


def summary(law: Law, tensors: Mapping[str, TensorInfo]) -> Updates:
    """Summarise a law for manifests: similar layers and experts share one entry.

    Args:
        law: law of the target.
        tensors: headers of the target.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    of_kind: dict[str, set[tuple[object, ...]]] = {}
    kinds = {name: INDEX.sub("*", name) for name in law.updates}
    for name, update in law.updates.items():
        shares = sorted(set(update.n_out.flat))
        key = update.n_in, update.factor, update.new, update.together, *shares
        groups.setdefault(key, []).append(name)
        of_kind.setdefault(kinds[name], set()).add(key)
    listed = []
    for names in groups.values():
        update = law.updates[names[0]]
        shown = (kinds[name] if len(of_kind[kinds[name]]) == 1 else name for name in names)
        listed.append(
            UpdateGroup(
                tensors=list(dict.fromkeys(shown)),
                lr=update.rate,
                weight_decay=update.decay,
                eps=update.eps,
                n_in=update.n_in,
                n_out=sorted({float(number) for number in update.n_out.flat}),
                new=update.new,
                together=update.together,
            )
        )
    # AdamW moves every element by about its rate, so this is the root mean square of all factors.
    total = sum(tensors[name].elements for name in law.updates)
    squares = sum(tensors[name].elements * update.rate**2 for name, update in law.updates.items())
    rate = math.sqrt(squares / total) if total else 1.0
    return Updates(exact=not law.why, why=list(law.why), single_rate=rate, groups=listed)
