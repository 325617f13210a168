"""Results of a probe: candidates ranked by their loss at equal compute."""

from collections.abc import Mapping
from typing import Any

from growkit.results import Result

OUTCOMES = ("ranked", "diverged", "broken", "refused")
"""Outcomes of a candidate, from best to worst."""


class ProbeCurve(Result):
    """Loss curve of one training run.

    Attributes:
        lr: learning rate of the source, from which the candidate's rates follow.
        seed: seed of the order of the windows.
        steps: numbers of steps after which the loss was measured.
        losses: losses on held-out text at these steps, in nats per token; null once a loss is not
            finite.
    """

    lr: float
    seed: int
    steps: list[int]
    losses: list[float | None]


class ProbeCandidate(Result):
    """A trained candidate, or the source itself, trained further.

    Attributes:
        name: name of the candidate or the source.
        source: whether it is the source.
        rank: rank from 1; null if refused.
        outcome: ``ranked``; ``diverged``, if a loss was not finite with every rate; ``broken``, if
            growth broke its promise, so that nothing was trained; or ``refused``, if it cannot be
            grown or trained.
        reason: the reason why it is not ranked by its loss, in a sentence; null if it is.
        steps: steps of its recipe, as written there.
        promise: ``exact``, ``bounded`` or ``different``; null for the source, and if refused.
        parameters: number of parameters; null if refused.
        step_flops: floating-point operations of a training step; null if it was not trained.
        lr: the source's rate with the lowest loss; null if it is not ranked by its loss.
        equal_step: the step at which equal compute is reached; null likewise.
        loss: loss at equal compute, in nats per token, mean over seeds; null likewise.
        spread: standard deviation of this loss over seeds; null likewise.
        losses: this loss for every seed; empty likewise.
        last_loss: loss after the last step, mean over seeds; null likewise.
        by_lr: loss at equal compute with every rate, in the order of the settings; null if a loss
            was not finite; empty if it was not trained.
        curves: loss curves of all training runs.
    """

    name: str
    source: bool
    rank: int | None = None
    outcome: str
    reason: str | None = None
    steps: list[str]
    promise: str | None = None
    parameters: int | None = None
    step_flops: int | None = None
    lr: float | None = None
    equal_step: float | None = None
    loss: float | None = None
    spread: float | None = None
    losses: list[float]
    last_loss: float | None = None
    by_lr: list[float | None]
    curves: list[ProbeCurve]


class PairedDifference(Result):
    """A paired difference of two losses.

    Attributes:
        difference: mean over all pairs, in nats per token.
        low: lower end of the confidence interval.
        high: upper end of the confidence interval.
        noise: whether the difference may be noise: the interval contains 0, or rounding explains
            the difference.
    """

    difference: float
    low: float
    high: float
    noise: bool


class ProbeDifference(PairedDifference):
    """The loss difference of two models at equal compute, worse minus better.

    Attributes:
        better: name of the model with the lower mean loss.
        worse: name of the other model.
    """

    better: str
    worse: str


class ProbeResult(Result):
    """The result of a probe, as ``--json`` prints it.

    Attributes:
        equal_compute: floating-point operations at which losses are compared: the smallest total
            of a ranked training run; null if none is ranked.
        source: the source folder, or its name on the Hub.
        reason: the finding in a sentence.
        early: whether the order means little, because few steps were taken by equal compute, or a
            loss was above its start; see ``warnings``.
        candidates: the source and the candidates by rank, refused ones last.
        differences: differences of all pairs that are ranked by their loss.
        rule: the rule that decides whether a difference is noise.
        steps: number of steps of every training run.
        seeds: number of training runs with every rate.
        lr: learning rates of the source that were tried.
        weight_decay: weight decay of all parameters but norms and biases.
        warmup: number of warmup steps.
        batch: windows per step.
        length: tokens per window.
        dtype: torch name of the dtype of computation; weights and moments were float32.
        device: ``cpu`` or the name of the GPU.
        text: the text file.
        text_sha256: SHA-256 of the part that was read.
        training_tokens: number of tokens available for training.
        held_out_tokens: number of held-out tokens, from the text's last tenth.
        work: the folder with the grown models; null if they were deleted.
        warnings: warnings to read before drawing conclusions.
        created: date of the result.
        seconds: duration since the last start or resumption.
        versions: versions of growkit and its dependencies.
    """

    equal_compute: float | None
    source: str
    reason: str
    early: bool
    candidates: list[ProbeCandidate]
    differences: list[ProbeDifference]
    rule: str
    steps: int
    seeds: int
    lr: list[float]
    weight_decay: float
    warmup: int
    batch: int
    length: int
    dtype: str
    device: str
    text: str
    text_sha256: str
    training_tokens: int
    held_out_tokens: int
    work: str | None
    warnings: list[str]
    created: str
    seconds: float
    versions: dict[str, str]


PRINTED = (ProbeResult,)


def difference_between(result: Mapping[str, Any], one: str, other: str) -> ProbeDifference | None:
    """The difference of two models, in either order; None if they were not compared."""
    return next((pair for pair in result["differences"] if _names(pair) == {one, other}), None)


def _names(pair: Mapping[str, Any]) -> set[str]:
    return {pair["better"], pair["worse"]}


def standing(result: Mapping[str, Any]) -> tuple[Any, Any, ProbeDifference | None]:
    """Find the source, the best candidate, and their difference.

    The best candidate is the first that is ahead of the source by more than noise; if there is
    none, the first ranked one.

    Returns:
        The candidate is None if none is ranked; the difference is None without two to compare.
    """
    source = next(candidate for candidate in result["candidates"] if candidate["source"])
    pairs = [
        (candidate, difference_between(result, candidate["name"], source["name"]))
        for candidate in result["candidates"]
        if candidate["outcome"] == "ranked" and not candidate["source"]
    ]
    ahead = (pair for pair in pairs if is_ahead(*pair))
    return (source, *next(ahead, pairs[0] if pairs else (None, None)))


def is_ahead(candidate: Any, difference: Mapping[str, Any] | None) -> bool:
    """Whether a candidate is ahead of the other model of a pair by more than noise."""
    return bool(
        difference and difference["better"] == candidate["name"] and not difference["noise"]
    )


def probe_sentence(result: Mapping[str, Any]) -> str:
    """State the finding in a sentence."""
    early = result["early"] and result["differences"]
    return f"{_found(result)}{'; so early, this means little, see the warnings' if early else ''}"


def _found(result: Mapping[str, Any]) -> str:
    source, best, margin = standing(result)
    if source["outcome"] != "ranked":
        return f"{source['name']} itself does not train, so nothing is compared: {source['reason']}"
    if best is None:
        return "no candidate was trained to its end; see the reason of each"
    assert margin is not None
    beyond, noise = "", "is more than noise"
    if margin["noise"]:
        beyond, noise = " beyond noise", "may be noise"
    loss = f"no candidate is ahead{beyond}: at equal compute the loss of the best, {best['name']},"
    tied = ""
    if is_ahead(best, margin):
        loss = f"{best['name']} is ahead: at equal compute its loss"
        like = [_names(pair) - {best["name"]} for pair in result["differences"] if pair["noise"]]
        names = [
            candidate["name"] for candidate in result["candidates"] if {candidate["name"]} in like
        ]
        alike = ", ".join(name for name in names if name != source["name"])
        tied = f"; {alike} cannot be distinguished from it" if alike else ""
    where = "below" if margin["better"] == best["name"] else "above"
    return (
        f"{loss} is {nats(margin['difference'])} nats per token {where} that of {source['name']}, "
        f"trained further, which {noise}{tied}"
    )


def nats(value: float, sign: str = "") -> str:
    """Format a loss difference with four decimals, or two significant digits if it is tiny.

    Args:
        value: the difference.
        sign: ``+`` to sign positive values as well.
    """
    return f"{value:{sign}.1e}" if value != 0 and abs(value) < 5e-4 else f"{value:{sign}.4f}"


def probe_next(result: Mapping[str, Any]) -> str:
    """Advice after a probe, in a sentence without its full stop."""
    source, best, difference = standing(result)
    if source["outcome"] != "ranked":
        return "probe again with a lower --lr, so that the source itself trains"
    if best is None:
        return "see below why each candidate was not ranked, and change or replace it"
    if result["early"]:
        return "probe again with more --steps, and as the warnings say"
    if is_ahead(best, difference):
        longer = " (probe with more --steps first, to see whether that lasts)"
        return f"grow the source by {best['name']}, and train the result{longer}"
    if difference is None or difference["noise"]:
        return "probe again with more --seeds and more --steps, so that less is noise"
    return "train the source further as it is; or probe with other candidates, or more --steps"
