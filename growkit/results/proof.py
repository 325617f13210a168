"""What a proof reports: the verdict with all of its figures, and what to do next."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from growkit.base.limits import within
from growkit.results import Result

Found = Mapping[str, Any]
"""A result, or what JSON holds of one."""


class TrainingProof(Result):
    """Source and target, trained side by side in strict float64.

    Both begin with the states of their optimizers, where the target was grown with one, and else
    with the moments that the source has after a first batch.

    Attributes:
        steps: steps of AdamW that both took.
        kept: whether both learned the same; null where the law of updates does not promise it.
        reason: the finding in a sentence.
        why: what keeps the target's training from being the source's, a phrase for each.
        begun: what both began with.
        losses_source: mean loss in nats per token on the batch of each step, before it, and on one
            more batch after the last.
        losses_target: the same of the target.
        relative: largest difference of a loss against the first loss, or of a logit after the last
            step against the logit scale, whichever is larger.
        tolerance: what ``relative`` must not exceed; null where nothing is promised.
        own: the same of the source against itself, with its weights disturbed before every step by
            about as much as rounding does.
        standing_still: number of the target's parameters that have no counterpart in the source,
            and were not trained.
        control: a deliberate fault in the factors.
        control_caught: whether it was noticed, after a single step; null where nothing is promised.
        learning_rate: of the source.
        weight_decay: of the source, on every parameter.
        eps: of the source.
    """

    steps: int
    kept: bool | None
    reason: str
    why: list[str]
    begun: str
    losses_source: list[float | None]
    losses_target: list[float | None]
    relative: float | None
    tolerance: float | None
    own: float | None
    standing_still: int
    control: str
    control_caught: bool | None
    learning_rate: float
    weight_decay: float
    eps: float


MOST_VALUES = 512
"""Singular values that are reported of a projection."""


class Spectrum(Result):
    """What low-rank updates had to hold in one projection, and what they leave over.

    Attributes:
        module: name of the projection, e.g. ``model.layers.0.self_attn.q_proj``.
        singular_values: of W₁ - W₂ for two matrices that share a base; for more, of what each of
            them is away from their mean. The root mean square of all groups, the largest first, at
            most ``MOST_VALUES``.
        rank: of the updates.
        kept: number of singular values that updates of this rank hold, 2r for two matrices.
        residual: what is left over, summed over all matrices.
        best: the least that can be left over, ½ Σ_{i>2r} σᵢ²; for more than two matrices what
            their mean as the base leaves with the best updates, which is not the least.
        unit: what residual and best are measured in.
    """

    module: str
    singular_values: list[float]
    rank: int
    kept: int
    residual: float
    best: float
    unit: str


class Measured(Result):
    """How far the target's logits are from the source's, in one dtype on one device.

    Attributes:
        dtype: torch name of the dtype that the models ran in.
        device: ``cpu`` or the name of the GPU.
        max_abs_logit_diff: largest |Δlogit|.
        mean_abs_logit_diff: mean |Δlogit|.
        logit_scale: root mean square of the source's logits.
        relative: ``max_abs_logit_diff / logit_scale``.
        tolerance: what ``relative`` must not exceed; null if the source itself computes nothing
            usable in this dtype, so that there is nothing to keep.
        tolerance_why: where the tolerance comes from, in a sentence; null if there is none.
        kl_nats_per_token: KL(source ‖ target), summed over the vocabulary, mean over tokens; 0
            where it is no more than rounding in float64.
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


class Trainability(Result):
    """Result of one backward pass through the target.

    Attributes:
        trainable: whether every parameter gets a gradient, and no two copies the same.
        copied: number of rows (neurons, heads' rows, embedding columns) that have copies.
        identical_gradients: of how many of them two copies get the same gradient, so that they
            would stay the same for ever.
        without_gradient: how many of them get none, on the text that was tried.
        first_identical: the first tensor with such a row; null if there is none.
        silent_parameters: names of parameters whose gradient is zero, the first few; and of those
            in which there are zeros that nothing can learn.
        idle_layers: number of layers that hand on what they are given. What they write gets a
            gradient at once; that of their other parameters is the one after a first step.
    """

    trainable: bool
    copied: int
    identical_gradients: int
    without_gradient: int
    first_identical: str | None
    silent_parameters: list[str]
    idle_layers: int


class CopyDistance(Result):
    """How far the gradients of copies are apart.

    Attributes:
        tensor: the tensor that holds them.
        copies: number of copies of every row.
        relative_distance: of the two closest copies, relative to their size; the median of rows.
        effective_rank_gain: effective rank of the gradient less that of equal copies; null for
            large matrices.
    """

    tensor: str
    copies: int
    relative_distance: float
    effective_rank_gain: float | None


class LayerError(Result):
    """How far what a module hands on is from the source's.

    Attributes:
        module: its name in the target.
        relative: largest difference of any copy, relative to the source's scale, strict float64.
    """

    module: str
    relative: float | None


class ModeResult(Result):
    """One inference mode of both models.

    Attributes:
        name: ``prefill``, ``cached decoding``, ``left padding``, ``explicit positions``, ``longest
            context``, ``save and reload`` or ``generate``.
        relative: largest difference of a logit, relative to their scale, strict float64.
        tolerance: what it must not exceed.
        native: the same in the storage dtype.
        native_tolerance: what that must not exceed.
        kept: whether both do; null if nothing is promised, or it was not tried.
        tried: whether it was tried.
        note: what exactly was tried, or the reason why nothing was.
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
    """Where two models first differ, and why.

    Attributes:
        layer: index of the first layer that differs; null outside of the layers.
        component: what differs first inside of it: ``embedding``, ``input_layernorm``, ``q_proj``,
            ``k_proj``, ``v_proj``, ``attention``, ``o_proj``, ``post_attention_layernorm``,
            ``mlp``, ``norm`` or ``lm_head``, or what else the family has, such as ``router``,
            ``experts`` or ``c_attn``; null if that is not known.
        tensor: the tensor at fault; null if it is none, or is not known.
        cause: the most likely cause, in a sentence.
        factor: the number by which something is multiplied, if that is all.
    """

    layer: int | None = None
    component: str | None = None
    tensor: str | None = None
    cause: str | None = None
    factor: float | None = None


class ChangedValue(Result):
    """A key of the target's config that is not what it should be.

    Attributes:
        name: of the key, as in ``changed``.
        expected: what growkit writes, or, where it is not known how the target was made, what the
            source has; as JSON, null where it is not set or long.
        found: what the target has, likewise.
    """

    name: str
    expected: str | None
    found: str | None


class RankCost(Result):
    """What a rank costs that was tried.

    Attributes:
        rank: of the updates.
        kl_nats_per_token: KL(source ‖ Shared DIFF), mean over tokens.
    """

    rank: int
    kl_nats_per_token: float


class Fingerprint(Result):
    """Some logits by which a model is known again (``growkit.training.assert_preserved``).

    Attributes:
        of: whose they are: ``source``, or ``target`` where that is another function.
        ids: token ids of one sequence, spread over the vocabulary.
        places: for each of these, the tokens whose logits are given.
        logits: these logits in strict float64, nine digits.
        scale: their root mean square.
        dtype: torch name of the dtype in which rounding was measured.
        rounding: root mean square of what computing in it changes, relative to the scale.
        limits: what a model may differ by, likewise, by the torch name of what it computes in.
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
            ``max_kl``, the name of an inference mode, ``training``, ``trainability`` or ``amount``.
        kept: whether the measured value is within its limit; null if nothing is promised, or it
            was not tried.
        sentence: the finding in words, without a full stop.
        place: the module, tensor, file, key or mode that differs; null if none does.
        measured: the measured value; null if there is none, or it is not finite.
        limit: the largest allowed value; null if there is none.
        advice: what to do, without a full stop; null if there is nothing to be done.
    """

    name: str
    kept: bool | None
    sentence: str
    place: str | None = None
    measured: float | None = None
    limit: float | None = None
    advice: str | None = None


class VerifyResult(Result):
    """The verdict, as ``growkit verify --json`` prints it. Numbers that are not finite are null.

    Attributes:
        promise: what the target is held to: ``exact``, ``bounded`` or ``different``.
        kept: whether the promise was kept: no finding failed.
        verdict: ``preserved``, ``changed as requested``, ``within the limit``, or what failed.
        reason: the verdict in a sentence.
        findings: everything that was compared, in the order in which it decides.
        weights_recovered: whether the target's weights give the source's back, every element of
            every tensor, bit for bit; null if it is not known how the target was made, so that
            the verdict rests on logits and on the files next to the weights.
        first_lost_tensor: the first tensor that does not; null if there is none.
        changed: files of the target, and keys of its config, that are not what growkit writes; or,
            where it is not known how the target was made, that do not do what the source's do.
        changed_values: of keys among these, what they are and what they should be.
        notes: what the verdict does not cover, in words.
        unknown_files: files of the target that were not compared.
        strict_float64: the comparison in strict float64.
        native: the comparison in the storage dtype, on the device.
        rounding: what rounding to that dtype does to the source alone: the source in it against
            the source in strict float64, on some tokens of every prompt. No promise, so no
            tolerance.
        max_kl: nats per token of KL in strict float64 above which the target is not kept; null
            for no limit.
        lost: what was given up, in one line; null if nothing was.
        loss_source: mean negative log-likelihood of the source in nats per token, strict float64.
        loss_target: the same of the target.
        loss_source_native: the same of the source in the storage dtype, on the device.
        loss_target_native: the same of the target.
        first_differing_layer: index of the first layer whose output differs; null when none does.
        first_difference: name of the first module whose output differs; null when none does.
        fault: where and why they differ; null when they do not.
        by_layer: the error of every module's output; empty if the layers cannot be compared.
        modes: the inference modes in which both were run.
        kl_by_position: KL at every position of the prompts, nats; in the storage dtype for what
            is to be exact, else in strict float64.
        tokens_by_position: the number of tokens of each of these means.
        logit_sample: some pairs of logits, source and target, in the storage dtype.
        negative_control_caught: whether a deliberate fault was noticed.
        negative_control: what the deliberate fault was.
        fingerprint: by which the model is known again in a trainer's memory; null if no usable
            logits are computed.
        training: of source and target side by side; null if it was not asked for.
        trainability: whether the target can learn, its copies above all; null if nothing was
            copied, or that is not known, and it was not asked for.
        symmetry: how far the gradients of copies are apart, by tensor.
        spectra: of projections that share bases, by module.
        kl_by_rank: what ranks cost that were tried when the target was made.
        tokens: number of tokens compared.
        predictions: number of tokens that the losses are means over.
        text: the text file; null for random tokens.
        text_sha256: hash of the text; null for random tokens.
        seed: of the random tokens.
        source: the source folder.
        target: the target folder.
        source_parameters: number of parameters in the source's files.
        parameters: the same of the target.
        source_bytes: size of the source's tensors.
        bytes: the same of the target.
        tensors_recovered: number of the source's tensors that the target gives back, bit for bit;
            null if one is lost, or if that is not known.
        source_tensors: of how many, but for those that models compute by themselves; null as above.
        created: when the proof was made, ISO 8601 in UTC.
        seconds: that the proof took; null in a manifest whose date was given (SOURCE_DATE_EPOCH).
        versions: of python, torch and transformers.
    """

    promise: str
    kept: bool
    verdict: str
    reason: str
    findings: list[Finding]
    weights_recovered: bool | None
    first_lost_tensor: str | None
    changed: list[str]
    changed_values: list[ChangedValue]
    notes: list[str]
    unknown_files: list[str]
    strict_float64: Measured
    native: Measured
    rounding: Measured
    max_kl: float | None
    lost: str | None
    loss_source: float | None
    loss_target: float | None
    loss_source_native: float | None
    loss_target_native: float | None
    first_differing_layer: int | None
    first_difference: str | None
    fault: Fault | None
    by_layer: list[LayerError]
    modes: list[ModeResult]
    kl_by_position: list[float | None]
    tokens_by_position: list[int]
    logit_sample: list[list[float]]
    negative_control_caught: bool
    negative_control: str
    fingerprint: Fingerprint | None
    training: TrainingProof | None
    trainability: Trainability | None
    symmetry: list[CopyDistance]
    spectra: list[Spectrum]
    kl_by_rank: list[RankCost]
    tokens: int
    predictions: int
    text: str | None
    text_sha256: str | None
    seed: int
    source: str
    target: str
    source_parameters: int
    parameters: int
    source_bytes: int
    bytes: int
    tensors_recovered: int | None
    source_tensors: int | None
    created: str
    seconds: float | None
    versions: dict[str, str]


def trainability_sentence(found: Found) -> str:
    """Whether copies can part in training (a ``growkit.results.proof.Trainability``)."""
    copied, stuck = found["copied"], found["identical_gradients"]
    names = found.get("silent_parameters") or []
    if stuck:
        return (
            f"{stuck:,} of {copied:,} copied rows get identical "
            f"gradients (first in {found['first_identical']}) and would stay equal in training; "
            "--symmetry break lets them part"
        )
    if names:
        return f"no gradient at all for {', '.join(names)}"
    if not copied:
        return f"every parameter gets a gradient{_late(found)}"
    silent = found["without_gradient"]
    unseen = f" ({silent:,} get none on this text)" if silent else ""
    return f"all copies get distinct gradients, for {copied:,} copied rows{unseen}{_late(found)}"


def _late(found: Found) -> str:
    idle = found.get("idle_layers")
    if not idle:
        return ""
    start = "new layer starts" if idle == 1 else f"{idle:,} new layers start"
    return (
        f"; the {start} as identity: the matrices that write the output learn from the first step, "
        "the rest from the second"
    )


def recovered_sentence(recovered: int, every: int) -> str:
    """How many of the source's tensors come back from the written weights, bit for bit."""
    count = every - recovered
    went = "the remaining one went" if count == 1 else f"the remaining {count:,} went"
    rest = f", {went} into tensors that are computed from them" if count else ""
    return f"{recovered:,} of {every:,} tensors are recovered bit for bit{rest}"


def too_much(kl: float, most: float) -> str:
    """That a KL is above its limit, with as many digits as show it."""
    digits = next((n for n in (3, 6, 9) if f"{kl:.{n}g}" != f"{most:.{n}g}"), 17)
    return f"{kl:.{digits}g} nats per token of KL are more than the {most:g} allowed"


def counted(number: int, name: str) -> str:
    """A number of things, e.g. ``1 prediction``, ``510 predictions``."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def fault_place(fault: Found) -> str:
    """Where two models part; empty if that is not known."""
    layer = None if fault.get("layer") is None else f"layer {fault['layer']}"
    places = (layer, fault.get("component"), fault.get("tensor"))
    return ", ".join(str(place) for place in places if place)


# What to do next.

MORE = (
    "prove it on more: real text (--text FILE), more windows (--prompts) or longer ones (--length)"
)


def failed(findings: Sequence[Finding]) -> Finding | None:
    """The finding that decides against a target; None if the target is kept."""
    return next((each for each in findings if each["kept"] is False), None)


def next_step(result: Found) -> str | None:
    """What to do about a target (a ``growkit.VerifyResult``), without a full stop; None: nothing.

    Advice on a failed finding comes before advice on a kept one.
    """
    findings = result.get("findings") or []
    first = failed(findings)
    return first["advice"] if first else next((f["advice"] for f in findings if f["advice"]), None)


def name_result(result: VerifyResult, source: str, target: str) -> VerifyResult:
    """Set the published names of both folders, and the advice, which mentions them."""
    result.source, result.target = source, target
    for finding in result.findings:
        if finding.kept is False or finding.name == "amount":
            finding.advice = _advice(finding.name, result)
    return result


def value_sentence(values: Found) -> str:
    """The value of a config key and the expected one (``growkit.results.proof.ChangedValue``)."""
    found, expected = (_value(values[key]) for key in ("found", "expected"))
    return f"{found} in place of {expected}"


def _value(text: str | None) -> str:
    return "another" if text is None else text


def _advice(name: str, result: VerifyResult) -> str:
    again = _make_again(result)
    known = {
        "weights": "copy the target's weights again, in case they were damaged on the way; or "
        + again,
        "strict_float64": again,
        "negative_control": MORE,
        "amount": MORE,
        "native": "store the target in a wider dtype, such as --dtype float32",
        "max_kl": "choose options that lose less, such as a higher --rank, or allow more "
        "(--max-kl)",
    }
    if name == "strict_float64" and result.promise == "exact" and result.weights_recovered is None:
        return (
            "check that this is the model the target was made from, and that the target was not "
            "trained since; keep growkit.json with it, so that the tensor at fault can be named"
        )
    if name == "files":
        return f"{_restore(result)}; or {again}"
    if name == "training":
        return _training_advice(result.training or {}, again)
    if name == "trainability":
        return _trainability_advice(result.trainability or {})
    return known.get(name, f"avoid {name} with this target, or {again}")


def _make_again(result: VerifyResult) -> str:
    """How to make the target once more."""
    if result.weights_recovered is None:
        return "make the target again from its source"
    output = f"{result.target.removesuffix('.rejected')}-again"
    file = f"{result.target}/growkit.json"
    return (
        f"make the target again from its growkit.json (growkit run {quote(file)} --source "
        f"{quote(result.source)} --output {quote(output)}); if that is rejected too, please report "
        "it with this proof"
    )


def _restore(result: VerifyResult) -> str:
    """How to undo the first change next to the weights."""
    name = result.changed[0]
    values = next((each for each in result.changed_values if each["name"] == name), None)
    if values is None:
        return f"put {name} back as it was"
    if values["expected"] is None:
        return f"put {name} back as it was (it is {_value(values['found'])})"
    return f"set {name} back to {values['expected']} (it is {_value(values['found'])})"


def _training_advice(training: Found, again: str) -> str:
    if training.get("control_caught") is False:
        return "train both for longer (--steps), so that a deliberate fault shows"
    tolerance = training.get("tolerance")
    if tolerance is not None and within(training.get("relative"), tolerance):
        return "grow the target again together with the state of the source's optimizer"
    return again


def _trainability_advice(found: Found) -> str:
    if found.get("silent_parameters") and not found.get("identical_gradients"):
        return (
            "prove it on other text (--text FILE), which may reach these parameters; or do without "
            "--trainability, if they need not train"
        )
    return "let copies part in training: make the target with --symmetry break"
