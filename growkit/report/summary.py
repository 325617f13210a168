"""What people look for under a verdict, in words: the same on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from sys import float_info
from typing import Any

from growkit.base.limits import within
from growkit.base.units import duration as duration
from growkit.base.units import size as size
from growkit.report.markup import figure, is_number
from growkit.results.sentences import (
    NOT_TRIED,
    counted,
    modes_sentence,
    recovered_sentence,
    trainability_sentence,
)

FAR = 1e6
"""Times the limit from which on it does not matter how many."""


@dataclass(frozen=True)
class Line:
    """What a proof says of one thing: what is read first, and what is read then."""

    first: str
    then: str = ""

    def __str__(self) -> str:
        return f"{self.first} ({self.then})" if self.then else self.first


def summary(result: Mapping[str, Any]) -> dict[str, Line]:
    """What people look for under a verdict, by name; what the result does not hold is left out.

    Args:
        result: a ``growkit.VerifyResult``.
    """
    lines = {
        "KL": _kl(result),
        "parameters": _parameters(result),
        "tensors": _tensors(result),
        "loss": _loss(result),
        "largest difference": _headroom(result),
        "inference modes": _modes(result),
        "training": _learning(result),
        "new capacity": _training(result),
        "negative control": _control(result),
        "proved": _proved(result),
    }
    return {name: line for name, line in lines.items() if line}


def text_name(result: Mapping[str, Any]) -> str:
    """What the models were asked about."""
    return Path(str(result["text"])).name if result.get("text") else "random tokens"


def native_name(result: Mapping[str, Any]) -> str:
    """What the comparison in the storage dtype is called, e.g. ``in bfloat16``."""
    return f"in {(result.get('native') or {}).get('dtype') or 'the storage dtype'}"


def predictions(result: Mapping[str, Any]) -> str:
    """How many predictions losses are means over."""
    count = result.get("predictions")
    return counted(count, "prediction") if isinstance(count, int) else "no predictions"


def headroom(result: Mapping[str, Any]) -> dict[str, float]:
    """How many times the largest difference is below its limit, in whichever inference mode.

    Returns:
        The factor, by ``in strict float64`` and ``native_name``: less than 1 is above the limit,
        infinite if nothing differs, 0 if there is no number. What has no limit is left out.
    """
    modes = result.get("modes") or []
    columns = {
        "in strict float64": ("strict_float64", "relative", "tolerance"),
        native_name(result): ("native", "native", "native_tolerance"),
    }
    found = {}
    for name, (key, relative, tolerance) in columns.items():
        measured = result.get(key) or {}
        pairs = [(measured.get("relative"), measured.get("tolerance"))]
        # What was not tried has neither.
        pairs += [(m.get(relative), m.get(tolerance)) for m in modes if m.get(tolerance)]
        ratios = [_ratio(limit, value) for value, limit in pairs if is_number(limit)]
        if ratios:
            found[name] = min(ratios)
    return found


def _ratio(limit: float, value: Any) -> float:
    if not is_number(value):
        return 0.0
    if value <= 0:
        return math.inf
    ratio = max(limit / value, float_info.min)  # 0 is no number
    return ratio if within(value, limit) else min(ratio, math.nextafter(1, 0))


def times(ratio: float) -> str:
    """A headroom in words, e.g. ``60 × below the limit``."""
    if not ratio:
        return "not a number"
    if ratio == math.inf:
        return "no difference at all"
    if ratio == 1:
        return "exactly the limit"
    side = "below" if ratio > 1 else "above"
    ratio = max(ratio, 1 / ratio)
    rounded = float(f"{ratio:.2g}")
    if side == "above" and rounded >= FAR:
        return "far above the limit"
    shown = f"{rounded:,.0f}" if 10 <= rounded < 1e6 else f"{rounded:.2g}"
    return f"{shown} × {side} the limit"


def _headroom(result: Mapping[str, Any]) -> Line | None:
    found = [(times(ratio), name) for name, ratio in headroom(result).items()]
    if not found:
        return None
    (first, where), *others = found
    return Line(first, "; ".join([where, *(" ".join(other) for other in others)]))


def _kl(result: Mapping[str, Any]) -> Line | None:
    """Where something may be lost, or has a limit."""
    strict, most = result.get("strict_float64") or {}, result.get("max_kl")
    if not strict or (result.get("promise") == "exact" and most is None):
        return None
    limit = f"at most {figure(most)} allowed" if most is not None else ""
    same = strict.get("top1_agreement")
    agreement = f"{same:.1%} of the likeliest next tokens are the same" if is_number(same) else ""
    kl = f"{figure(strict.get('kl_nats_per_token'))} nats per token"
    return Line(kl, "; ".join(filter(None, [limit, agreement])))


def _parameters(result: Mapping[str, Any]) -> Line | None:
    before, after = result.get("source_parameters"), result.get("parameters")
    if not before or not after:
        return None
    ratio = f"{after / before:.3g}"
    factor = f"× {ratio}" if ratio != "1" else "" if after == before else f"{after - before:+,}"
    return Line(f"{before:,} → {after:,}", "; ".join(filter(None, [factor, _sizes(result)])))


def _sizes(result: Mapping[str, Any]) -> str:
    before, after = result.get("source_bytes"), result.get("bytes")
    dtype = (result.get("native") or {}).get("dtype")
    if not before or not after:
        return ""
    sizes = dict.fromkeys([size(before), size(after)])
    return " → ".join(sizes) + (f" in {dtype}" if dtype else "")


def _tensors(result: Mapping[str, Any]) -> Line | None:
    recovered, every = result.get("tensors_recovered"), result.get("source_tensors")
    if result.get("first_lost_tensor"):
        return Line("not all recovered", f"first: {result['first_lost_tensor']}")
    if recovered is None or every is None:
        why = "it is not known how the target was made"
        return Line("not compared", why) if "parameters" in result else None
    first, _, then = recovered_sentence(recovered, every).partition(" tensors are recovered ")
    return Line(f"{first} recovered", then)


def _loss(result: Mapping[str, Any]) -> Line | None:
    strict, native = (
        [result.get(f"loss_{of}{ending}") for of in ("source", "target")]
        for ending in ("", "_native")
    )
    if not any(map(is_number, strict)):
        return None
    runs = f"{native_name(result)} {_arrow(native, '.4f')}; " if any(map(is_number, native)) else ""
    over = f"nats per token, {predictions(result)}, {text_name(result)}"
    form = ".6f" if result.get("promise") == "exact" else ".4f"
    return Line(_arrow(strict, form), f"in strict float64; {runs}{over}")


def _arrow(values: Sequence[Any], form: str) -> str:
    return " → ".join(figure(value, form) for value in values)


def _modes(result: Mapping[str, Any]) -> Line | None:
    modes: list[dict[str, Any]]
    modes = [{"note": "", "kept": None} | dict(mode) for mode in result.get("modes") or []]
    if not modes:
        return None
    tried = [mode for mode in modes if not str(mode["note"]).startswith(NOT_TRIED)]
    kept, failed, free = (sum(mode["kept"] is how for mode in tried) for how in (True, False, None))
    _, _, then = modes_sentence(modes).partition(" inference modes")
    first = f"{kept} of {len(modes)} kept"
    if kept == len(modes):
        first = f"all {kept} kept"
    if free:
        first = f"{free} of {len(modes)} without a limit" + (f", {kept} kept" if kept else "")
    return Line(first + (f", {failed} not the same" if failed else ""), then[2:])


def _learning(result: Mapping[str, Any]) -> Line | None:
    """Where both were trained."""
    found = result.get("training")
    if not found:
        return None
    losses = [found.get(f"losses_{of}") or [None] for of in ("source", "target")]
    ends = _arrow([each[-1] for each in losses], ".6f")
    steps = found.get("steps")
    times = counted(steps, "step") if isinstance(steps, int) else "some steps"
    then = f"after {times} of AdamW in float64 the losses are {ends}"
    first = {
        True: "learns what the source does",
        False: "does NOT learn what the source does",
        None: "leaves the source's path",
    }[found.get("kept")]
    return Line(first, then)


def _training(result: Mapping[str, Any]) -> Line | None:
    found = result.get("trainability")
    if not found:
        return None
    then = trainability_sentence(found).removeprefix("new capacity: ")
    if found.get("identical_gradients"):
        return Line("copies stay equal", then)
    return Line("can train" if found.get("trainable") else "cannot train as it is", then)


def _control(result: Mapping[str, Any]) -> Line | None:
    if not result.get("negative_control"):
        return None
    caught = "caught" if result.get("negative_control_caught") else "NOT caught"
    return Line(caught, str(result["negative_control"]))


def _proved(result: Mapping[str, Any]) -> Line | None:
    created, seconds = result.get("created"), result.get("seconds")
    if not created:
        return None
    try:
        when = datetime.fromisoformat(str(created)).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        when = str(created)
    device = (result.get("native") or {}).get("device")
    took = f"in {duration(seconds)}" if is_number(seconds) else ""
    return Line(when, ", ".join(filter(None, [took, f"on {device}" if device else ""])))
