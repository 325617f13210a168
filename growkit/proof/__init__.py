"""Proof: two model folders compute the same function, shown with transformers itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

STRICT_TOLERANCE = 1e-12
"""Largest relative error of an exact operation in strict float64; see ``docs/numerics.md``."""


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        text: file with real text, or None for seeded random tokens.
        prompts: number of windows of text, or of random prompts.
        length: tokens in each.
        seed: of the random prompts and of the negative control.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
    """

    text: str | None = None
    prompts: int = 8
    length: int = 512
    seed: int = 0
    device: str = "auto"


class Measured(TypedDict):
    """How far the target's logits are from the source's, in one dtype on one device.

    Attributes:
        dtype: torch name of the dtype that the models ran in.
        device: ``cpu`` or the name of the GPU.
        max_abs_logit_diff: largest |Δlogit|.
        mean_abs_logit_diff: mean |Δlogit|.
        logit_scale: root mean square of the source's logits.
        relative: ``max_abs_logit_diff / logit_scale``.
        tolerance: what ``relative`` must stay below.
        kl_nats_per_token: KL(source ‖ target), summed over the vocabulary, mean over tokens.
        top1_agreement: share of tokens on which both rank the same token first.
    """

    dtype: str
    device: str
    max_abs_logit_diff: float | None
    mean_abs_logit_diff: float | None
    logit_scale: float | None
    relative: float | None
    tolerance: float
    kl_nats_per_token: float | None
    top1_agreement: float


class VerifyResult(TypedDict):
    """The verdict, as ``growkit verify --json`` prints it. Numbers that are not finite are null.

    Attributes:
        promise: what the target's manifest promises: ``exact``, ``bounded`` or ``different``;
            ``exact`` where there is no manifest.
        kept: whether the promise was kept.
        reason: the verdict in a sentence.
        strict_float64: the comparison in strict float64.
        native: the comparison in the storage dtype, on the device.
        loss_source: mean negative log-likelihood of the source in nats per token, strict float64.
        loss_target: the same of the target.
        first_differing_layer: index of the first layer whose output differs; null when none does.
        first_difference: name of the first module whose output differs; null when none does.
        negative_control_caught: whether a deliberate fault was noticed.
        negative_control: what the deliberate fault was.
        tokens: number of tokens compared.
        predictions: number of tokens that the losses are means over.
        text: the text file; null for random tokens.
        text_sha256: hash of the text; null for random tokens.
        seed: of the random tokens.
        source: the source folder.
        target: the target folder.
        versions: of python, torch and transformers.
    """

    promise: str
    kept: bool
    reason: str
    strict_float64: Measured
    native: Measured
    loss_source: float | None
    loss_target: float | None
    first_differing_layer: int | None
    first_difference: str | None
    negative_control_caught: bool
    negative_control: str
    tokens: int
    predictions: int
    text: str | None
    text_sha256: str | None
    seed: int
    source: str
    target: str
    versions: dict[str, str]
