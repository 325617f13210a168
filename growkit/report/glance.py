"""A checkpoint at a glance, in words: the same on the terminal and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from growkit.report.summary import size

if TYPE_CHECKING:
    from growkit.inspection import Attention, Inspection


def at_a_glance(result: Inspection) -> Iterator[tuple[str, str]]:
    """What a checkpoint is: names and what they are."""
    yield "folder", result.folder
    yield "family", f"{result.family} ({result.model_class or 'no class named'})"
    yield "parameters", f"{result.parameters:,} in {result.tensors} tensors"
    yield "storage", f"{size(result.bytes)} in {result.dtype}"
    yield "embeddings", "tied" if result.tied else "untied"
    for key, value in result.config_sizes.items():
        each = value if isinstance(value, list) else [value]
        yield key, " ".join(f"{number:,}" for number in each)
    if result.attention:
        yield from _attention(result.attention)
    yield "axes", ", ".join(f"{axis} {size:,}" for axis, size in result.sizes.items())
    yield "files", ", ".join(result.files)
    for name, why in result.dropped.items():
        yield "left out", f"{name}: {why}"
    for number, step in enumerate(result.possible):
        outcome = step["promise"]
        outcome += f", as {step['becomes']}" if step["becomes"] != result.family else ""
        yield "" if number else "possible next", f"{step['command']} ({outcome})"


def _attention(attention: Attention) -> Iterator[tuple[str, str]]:
    ratio = f", {attention.ratio}:1" if attention.ratio else ""
    yield "attention", attention.variant
    yield (
        "heads",
        f"{attention.signal_heads} signal, {attention.noise_heads} noise{ratio}, "
        f"{attention.kv_heads} value heads",
    )
    for label, values in (
        ("λ per layer", attention.lambda_value),
        ("λ_init per layer", attention.lambda_init),
    ):
        if values:
            yield label, " ".join(f"{value:.4f}" for value in values)
    if attention.noise_heads and not attention.lambda_value:
        yield "λ", "projected from every token"
