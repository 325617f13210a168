"""Results of a proof: the verdict with all of its figures, and advice."""

from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any

from growkit.results import Result

Found = Mapping[str, Any]
"""A result, or its JSON."""


MAX_VALUES = 512
"""Largest number of singular values reported for a projection."""


class Spectrum(Result):
    """Singular values of low-rank updates, or of a compressed projection, and the residual.

    Attributes:
        module: name of the projection, e.g. ``model.layers.0.self_attn.q_proj``.
        singular_values: singular values of W₁ - W₂ for two matrices that share a base; for more
            matrices, those of each one's difference from their mean; the root mean square over all
            groups. For a compressed latent, those of the weighted projection. The largest first,
            at most ``MAX_VALUES``.
        rank: rank of the updates, or number of components of the latent.
        kept: number of singular values that updates of this rank hold, 2r for two matrices.
        residual: the residual, summed over all matrices.
        best: the smallest possible residual, ½ Σ_{i>2r} σᵢ². For more than two matrices, the
            residual of the best updates with the mean as the base, which is not the smallest.
        unit: unit of residual and best.
    """

    module: str
    singular_values: list[float]
    rank: int
    kept: int
    residual: float
    best: float
    unit: str


class Measured(Result):
    """Differences between the logits of source and target, in one dtype on one device.

    Attributes:
        dtype: torch name of the dtype in which the models ran.
        device: ``cpu`` or the name of another device.
        max_abs_logit_diff: largest |Δlogit|.
        mean_abs_logit_diff: mean |Δlogit|.
        logit_scale: root mean square of the source's logits.
        relative: ``max_abs_logit_diff / logit_scale``.
        tolerance: upper limit of ``relative``; null if the source itself computes nothing usable
            in this dtype.
        tolerance_why: the origin of the tolerance, in a sentence; null without a tolerance.
        kl_nats_per_token: KL(source ‖ target), summed over the vocabulary, mean over tokens; 0
            if it is no more than float64 rounding.
        top1_agreement: share of tokens on which both rank the same token first.
    """

    dtype: str
    device: str
    max_abs_logit_diff: float | None
    mean_abs_logit_diff: float | None
    logit_scale: float | None
    relative: float | None
    tolerance: float | None
    tolerance_why: str | None
    kl_nats_per_token: float | None
    top1_agreement: float


class LayerError(Result):
    """Error of one module's output.

    Attributes:
        module: name of the module in the target.
        relative: largest difference of any copy from the source's output, relative to the source's
            scale, in strict float64.
    """

    module: str
    relative: float | None


class ModeResult(Result):
    """One inference mode of both models.

    Attributes:
        name: ``prefill``, ``cached decoding``, ``left padding``, ``explicit positions``, ``longest
            context``, ``long texts``, ``save and reload``, ``generate``, ``loss`` or, in the
            storage dtype on a device other than a CPU, ``attention: `` with the name of a kernel.
        relative: largest logit difference, relative to the logit scale, in strict float64; of
            ``loss``, the difference of the losses that the classes return, relative to the larger
            one of the source's loss and its logit scale.
        tolerance: upper limit of ``relative``.
        native: the same difference in the storage dtype.
        native_tolerance: upper limit of ``native``.
        kept: whether both are within their limits; null if nothing is promised, or the mode was
            not tried.
        tried: whether the mode was tried.
        note: the exact comparison, or the reason why the mode was not tried.
    """

    name: str
    relative: float | None = None
    tolerance: float | None = None
    native: float | None = None
    native_tolerance: float | None = None
    kept: bool | None = None
    tried: bool
    note: str


class Fault(Result):
    """The first difference between two models, with its cause.

    Attributes:
        layer: index of the first layer that differs; null outside the layers.
        component: the first component that differs: ``embedding``, ``input_layernorm``,
            ``q_proj``, ``k_proj``, ``v_proj``, ``attention``, ``o_proj``,
            ``post_attention_layernorm``, ``mlp``, ``norm`` or ``lm_head``, or another one of the
            family, such as ``router``, ``experts`` or ``c_attn``; null if unknown.
        tensor: the tensor at fault; null if none is, or if it is unknown.
        cause: the most likely cause, in a sentence.
        factor: the factor between the two, if they differ by nothing else.
    """

    layer: int | None = None
    component: str | None = None
    tensor: str | None = None
    cause: str | None = None
    factor: float | None = None


class ChangedValue(Result):
    """A key of the target's config with an unexpected value.

    Attributes:
        name: name of the key, as in ``changed``.
        expected: the value that growkit writes or, if the target's recipe is unknown, the source's
            value; as JSON, null if it is unset or long. Of a long list, it is the first entry that
            differs, with its number.
        found: the target's value, likewise.
    """

    name: str
    expected: str | None
    found: str | None


class RankCost(Result):
    """Cost of a rank that was tried.

    Attributes:
        rank: rank of the updates.
        kl_nats_per_token: KL(source ‖ Shared DIFF), mean over tokens.
    """

    rank: int
    kl_nats_per_token: float


class Fingerprint(Result):
    """Sample logits that identify a model (``growkit.training.assert_preserved``).

    Attributes:
        of: the model of the logits: ``source``, or ``target`` if it computes another function.
        ids: token ids of one sequence, spread over the vocabulary.
        places: for each position, the tokens whose logits are given.
        logits: logits of these tokens in strict float64, nine digits.
        scale: root mean square of the logits.
        dtype: torch name of the dtype in which rounding was measured.
        rounding: root mean square of the change by computing in ``dtype``, relative to the scale.
        limits: largest allowed root mean square difference, relative to the scale, by the torch
            name of the dtype of computation.
    """

    of: str
    ids: list[int]
    places: list[list[int]]
    logits: list[list[float]]
    scale: float
    dtype: str
    rounding: float
    limits: dict[str, float]


class Finding(Result):
    """One comparison of a proof. The first that failed decides the verdict.

    Attributes:
        name: ``weights``, ``files``, ``strict_float64``, ``negative_control``, ``native``,
            ``max_kl``, ``handed_on`` (what new layers pass on beside hidden states), ``amount``,
            the name of an inference mode, or that of another section.
        kept: whether the measured value is within its limit; null if nothing is promised, or
            nothing was measured.
        sentence: the finding in words, without a full stop.
        place: the module, tensor, file, key or mode that differs; null if none does.
        measured: the measured value; null if there is none, or it is not finite.
        limit: the largest allowed value; null if there is none.
        advice: the next step, without a full stop; null if none is needed.
        verdict: the verdict if this decides, of what keeps an exact promise but for it; null for
            the promise itself.
        in_reason: whether the reason repeats it, even if it does not decide.
    """

    name: str
    kept: bool | None
    sentence: str
    place: str | None = None
    measured: float | None = None
    limit: float | None = None
    advice: str | None = None
    verdict: str | None = None
    in_reason: bool | None = None


class Section(Result):
    """What one check of a proof found.

    Attributes:
        findings: its comparisons, in the order in which they decide.
        notes: what they do not cover, in words.
    """

    findings: list[Finding]
    notes: list[str]


class WeightsSection(Section):
    """The weights, compared element by element.

    Attributes:
        recovered: whether the source's weights are recovered from the target's, every element of
            every tensor, bit for bit; null if the target's recipe is unknown, so that the verdict
            depends on logits and on the files next to the weights.
        first_lost_tensor: the first source tensor that is not recovered; null if there is none.
        tensors_recovered: number of source tensors that are recovered from the target, bit for
            bit; null if one is lost, or if that is unknown.
        source_tensors: number of source tensors, without buffers that models compute themselves;
            null in the same cases.
        spectra: spectra of projections that share bases, by module.
        kl_by_rank: cost of the ranks that were tried when the target was made.
        source_parameters: number of parameters in the source's files that its class reads.
        parameters: number of parameters in the target's files that its class reads.
        source_bytes: size of their tensors in the source.
        bytes: size of their tensors in the target.
    """

    recovered: bool | None
    first_lost_tensor: str | None
    tensors_recovered: int | None
    source_tensors: int | None
    spectra: list[Spectrum]
    kl_by_rank: list[RankCost]
    source_parameters: int
    parameters: int
    source_bytes: int
    bytes: int


class FilesSection(Section):
    """Everything in the folders but weights.

    Attributes:
        changed: files of the target, and keys of its config, that differ from growkit's output; if
            the target's recipe is unknown, those that differ in effect from the source's.
        changed_values: found and expected values of the changed config keys.
        unknown_files: files of the target that were not compared.
    """

    changed: list[str]
    changed_values: list[ChangedValue]
    unknown_files: list[str]


class LogitsSection(Section):
    """The logits of both models on the prompts. Losses are means in nats per token.

    Attributes:
        strict_float64: the comparison in strict float64, on the CPU if the device's arithmetic
            has a fault.
        native: the comparison in the storage dtype, on the device.
        rounding: the effect of rounding to the storage dtype on the source alone: the source in
            this dtype compared with the source in strict float64, on some tokens of every prompt.
            It has no tolerance, since nothing is promised.
        inflation: on the same tokens, KL(source in strict float64 ‖ target in the storage dtype)
            over KL(source in strict float64 ‖ source in the storage dtype); null if another
            function is promised, with fewer than 32 tokens, or in float32, where rounding depends
            on the order of sums.
        inflation_limit: upper limit of ``inflation``: 1.1, increased by four standard errors.
        max_kl: upper limit of the KL in strict float64, in nats per token; null for no limit.
        loss_source: mean negative log-likelihood of the source, in strict float64.
        loss_target: the same loss of the target.
        loss_source_native: the same loss of the source in the storage dtype, on the device.
        loss_target_native: the same loss of the target in the storage dtype, on the device.
        first_differing_layer: index of the first layer whose output differs; null if none does.
        first_difference: name of the first module whose output differs; null if none does.
        by_layer: the error of every module's output; empty if the layers cannot be compared.
        kl_by_position: mean KL at every position of the prompts, in nats; in the storage dtype if
            the promise is exact, else in strict float64.
        tokens_by_position: number of tokens in the mean of every position.
        logit_sample: sample pairs of logits, source and target, in the storage dtype.
        negative_control: description of the deliberate fault.
        negative_control_caught: whether a deliberate fault was detected.
        fingerprint: sample logits that identify the model in a trainer's memory; null if it
            computes no usable logits.
        tokens: number of compared tokens.
        predictions: number of predicted tokens over which losses are averaged.
    """

    strict_float64: Measured
    native: Measured
    rounding: Measured
    inflation: float | None
    inflation_limit: float | None
    max_kl: float | None
    loss_source: float | None
    loss_target: float | None
    loss_source_native: float | None
    loss_target_native: float | None
    first_differing_layer: int | None
    first_difference: str | None
    by_layer: list[LayerError]
    kl_by_position: list[float | None]
    tokens_by_position: list[int]
    logit_sample: list[list[float]]
    negative_control: str
    negative_control_caught: bool
    fingerprint: Fingerprint | None
    tokens: int
    predictions: int


class ModesSection(Section):
    """The inference modes of both models.

    Attributes:
        modes: the modes, those that were not tried included.
    """

    modes: list[ModeResult]


class Sections(Result):
    """All sections of a proof, by the check that found them; null for what was not checked.

    A check in a file of its own adds its section, with figures of its own: ``adapter`` (both models
    with their adapters, in PEFT), ``dequantised`` (growkit's dequantised weights and those of
    transformers), ``other_parts`` (what two multimodal models have around their language models).

    Attributes:
        weights: the weights, element by element.
        files: config, tokenizer, code and all other files next to the weights.
        logits: the logits of both models on the prompts.
        modes: the inference modes.
        device: the arithmetic of the device; if it is not a CPU.
    """

    weights: WeightsSection
    files: FilesSection
    logits: LogitsSection
    modes: ModesSection
    device: Section | None = None

    @property
    def findings(self) -> list[Finding]:
        """All findings, in the order in which they decide."""
        return findings_of({"sections": self})


class VerifyResult(Result):
    """The verdict, as ``growkit verify --json`` prints it. Numbers that are not finite are null.

    Attributes:
        promise: the promise about the target: ``exact``, ``bounded`` or ``different``.
        kept: whether the promise was kept: no finding failed.
        verdict: ``preserved``, ``changed as requested``, ``within the limit``, or the failure.
        reason: the verdict in a sentence.
        lost: the loss, in one line; null if there is none.
        fault: place and cause of the difference; null if the models agree.
        sections: everything that was compared, by check.
        text: the text file; null for random tokens.
        text_sha256: SHA-256 of the text; null for random tokens.
        seed: seed of the random tokens.
        source: the source folder.
        target: the target folder.
        created: date of the proof, ISO 8601 in UTC.
        seconds: duration of the proof; null in a manifest with a given date (SOURCE_DATE_EPOCH).
        versions: versions of python, growkit, torch, transformers and safetensors, and of the
            driver and libraries of a device.
    """

    promise: str
    kept: bool
    verdict: str
    reason: str
    lost: str | None
    fault: Fault | None
    sections: Sections
    text: str | None
    text_sha256: str | None
    seed: int
    source: str
    target: str
    created: str
    seconds: float | None
    versions: dict[str, str]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all sections, in the order in which they decide."""
        return self.sections.findings

    @property
    def notes(self) -> list[str]:
        """What the proof does not cover, in words."""
        return notes_of(self)


def findings_of(result: Found) -> list[Finding]:
    """All findings of a proof (a ``growkit.VerifyResult``), in the order in which they decide."""
    sections = result["sections"].values()
    return [finding for section in sections if section for finding in section["findings"]]


def notes_of(result: Found) -> list[str]:
    """What a proof (a ``growkit.VerifyResult``) does not cover, in words."""
    sections = result["sections"].values()
    return [note for section in sections if section for note in section["notes"]]


def recovered_sentence(recovered: int, every: int) -> str:
    """State how many source tensors are recovered from the written weights, bit for bit."""
    count = every - recovered
    went = "the remaining one went" if count == 1 else f"the remaining {count:,} went"
    rest = f", {went} into tensors that are computed from them" if count else ""
    return f"{recovered:,} of {every:,} tensors are recovered bit for bit{rest}"


def too_much(kl: float, limit: float) -> str:
    """State that a KL exceeds its limit, with enough digits to show it."""
    digits = next((n for n in (3, 6, 9) if f"{kl:.{n}g}" != f"{limit:.{n}g}"), 17)
    return f"{kl:.{digits}g} nats per token of KL are more than the {limit:g} allowed"


def counted(number: int, name: str) -> str:
    """Format a count with its noun, e.g. ``1 prediction``, ``510 predictions``."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def fault_place(fault: Found) -> str:
    """Format the place of a fault; empty if it is unknown."""
    layer = None if fault.get("layer") is None else f"layer {fault['layer']}"
    places = (layer, fault.get("component"), fault.get("tensor"))
    return ", ".join(str(place) for place in places if place)


# Advice.

MORE = (
    "prove it on more: real text (--text FILE), more windows (--prompts) or longer ones (--length)"
)

AGAIN = "make the target again"
"""Part of an advice; ``name_result`` adds how, as soon as both names are known."""


def failed(findings: Iterable[Finding]) -> Finding | None:
    """The first failed finding, which decides the verdict; None if none failed."""
    return next((finding for finding in findings if finding["kept"] is False), None)


def name_result(result: VerifyResult, source: str, target: str) -> VerifyResult:
    """Set the published names of both folders, also in the advice."""
    result.source, result.target = source, target
    again = _make_again(result)
    for finding in findings_of(result):
        if finding.kept is False and not finding.advice:
            finding.advice = f"avoid {finding.name} with this target, or {AGAIN}"
        finding.advice = finding.advice and finding.advice.replace(AGAIN, again)
    return result


def value_sentence(values: Found) -> str:
    """Compare found and expected value of a key (``growkit.results.proof_result.ChangedValue``)."""
    actual, expected = (value_in_words(values[key]) for key in ("found", "expected"))
    if values["found"] is not None and actual == expected:
        return f"{actual}, which only one of the two classes reads"
    return f"{actual} in place of {expected}"


def value_in_words(text: str | None) -> str:
    """Either value of a key, which may be long or unset."""
    return "another value" if text is None else text


def _make_again(result: VerifyResult) -> str:
    """How to make the target again."""
    if result.sections.weights.recovered is None:
        return f"{AGAIN} from its source"
    output = f"{result.target.removesuffix('.rejected')}-again"
    file = f"{result.target}/growkit.json"
    return (
        f"{AGAIN} from its growkit.json (growkit run {quote(file)} --source "
        f"{quote(result.source)} --output {quote(output)}); if that is rejected too, please report "
        "it with this proof"
    )
