"""What people look for under a verdict, in words: the same on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from growkit.report.markup import figure, is_number
from growkit.results.sentences import modes_sentence, trainability_sentence

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def summary(result: Mapping[str, Any]) -> dict[str, str]:
    """Names and what they are of a proof; what the result does not hold is left out.

    Args:
        result: a ``growkit.proof.VerifyResult``.
    """
    lines = {
        "lost": result.get("lost"),
        "KL": _kl(result) if result.get("promise") != "exact" or result.get("max_kl") else None,
        "parameters": _parameters(result),
        "size": _sizes(result),
        "tensors": _tensors(result),
        "loss": _loss(result),
        "headroom": _headroom(result),
        "ways": _ways(result),
        "training": _training(result),
        "control": _control(result),
        "proved": _proved(result),
    }
    return {name: words for name, words in lines.items() if words}


def size(count: float) -> str:
    """A number of bytes as people read it, e.g. ``6.43 MB``."""
    *units, largest = UNITS
    for unit in units:
        if float(f"{count:.3g}") < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3f} {largest}"


def duration(seconds: float) -> str:
    """A time as people read it, e.g. ``2 min 5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def text_name(result: Mapping[str, Any]) -> str:
    """What the models were asked about."""
    return Path(str(result["text"])).name if result.get("text") else "random tokens"


def headroom(result: Mapping[str, Any]) -> dict[str, float]:
    """How many times the largest difference is below its limit, in whichever way it was asked.

    Returns:
        The factor, by ``in strict float64`` and ``as it runs``: less than 1 is above the limit,
        infinite if nothing differs, 0 if there is no number. What has no limit is left out.
    """
    modes = result.get("modes") or []
    columns = {
        "in strict float64": ("strict_float64", "relative", "tolerance"),
        "as it runs": ("native", "native", "native_tolerance"),
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
    return limit / value if value > 0 else math.inf


def times(ratio: float) -> str:
    """A headroom in words, e.g. ``60 × below the limit``."""
    if not ratio:
        return "not a number"
    if ratio == math.inf:
        return "no difference at all"
    side = "below" if ratio >= 1 else "above"
    ratio = max(ratio, 1 / ratio)
    rounded = float(f"{ratio:.2g}")
    shown = f"{rounded:,.0f}" if 10 <= rounded < 1e6 else f"{rounded:.2g}"
    return f"{shown} × {side} the limit"


def _headroom(result: Mapping[str, Any]) -> str:
    return "; ".join(f"{times(ratio)} {name}" for name, ratio in headroom(result).items())


def _kl(result: Mapping[str, Any]) -> str | None:
    strict, most = result.get("strict_float64") or {}, result.get("max_kl")
    if "kl_nats_per_token" not in strict:
        return None
    limit = f", of at most {figure(most)}" if most is not None else ""
    same = strict.get("top1_agreement")
    agreement = f"; the likeliest token is the same {same:.1%} of the time" if same else ""
    return f"{figure(strict['kl_nats_per_token'])} nats per token{limit}{agreement}"


def _parameters(result: Mapping[str, Any]) -> str | None:
    before, after = result.get("source_parameters"), result.get("parameters")
    if not before or not after:
        return None
    factor = f" (× {after / before:.3g})" if after != before else ""
    return f"{before:,} → {after:,}{factor}"


def _sizes(result: Mapping[str, Any]) -> str | None:
    before, after = result.get("source_bytes"), result.get("bytes")
    if not before or not after:
        return None
    dtype = (result.get("native") or {}).get("dtype")
    return f"{size(before)} → {size(after)}" + (f" in {dtype}" if dtype else "")


def _tensors(result: Mapping[str, Any]) -> str | None:
    recovered, every = result.get("tensors_recovered"), result.get("source_tensors")
    if result.get("first_lost_tensor"):
        return f"{result['first_lost_tensor']} is lost"
    if recovered is None or every is None:
        known = "parameters" in result
        return "not compared: it is not known how the target was made" if known else None
    rest = "" if recovered == every else "; the others were made into new ones"
    return f"{recovered:,} of {every:,} recovered, bit for bit{rest}"


def _loss(result: Mapping[str, Any]) -> str | None:
    keys = ("loss_source", "loss_target")
    strict = [result.get(key) for key in keys]
    native = [result.get(f"{key}_native") for key in keys]
    if not any(map(is_number, strict)):
        return None
    form = ".9f" if result.get("promise") == "exact" else ".4f"
    shown = " → ".join(figure(each, form) for each in strict) + " in strict float64"
    if any(map(is_number, native)):
        shown += ", " + " → ".join(figure(each, ".4f") for each in native) + " as it runs"
    return f"{shown}; nats per token, {figure(result.get('predictions'))} predictions" + (
        f" ({text_name(result)})"
    )


def _ways(result: Mapping[str, Any]) -> str | None:
    modes = [{"note": "", "kept": None} | dict(mode) for mode in result.get("modes") or []]
    return modes_sentence(modes).removeprefix("asked in ") if modes else None


def _training(result: Mapping[str, Any]) -> str | None:
    found = result.get("trainability")
    return trainability_sentence(found).removeprefix("new capacity: ") if found else None


def _control(result: Mapping[str, Any]) -> str | None:
    if not result.get("negative_control"):
        return None
    caught = "caught" if result.get("negative_control_caught") else "NOT caught"
    return f"{result['negative_control']}: {caught}"


def _proved(result: Mapping[str, Any]) -> str | None:
    created, seconds = result.get("created"), result.get("seconds")
    if not created:
        return None
    try:
        when = datetime.fromisoformat(str(created)).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        when = str(created)
    device = (result.get("native") or {}).get("device")
    took = f", in {duration(seconds)}" if is_number(seconds) else ""
    return f"{when}{took}" + (f", on {device}" if device else "")
