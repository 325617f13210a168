"""What a probe reports: candidates in the order of their loss at equal compute."""

from collections.abc import Mapping
from typing import Any

from growkit.results import Result

OUTCOMES = ("ranked", "diverged", "broken", "refused")
"""What becomes of a candidate, from best to worst."""


class ProbeCurve(Result):
    """One training of a candidate.

    Attributes:
        lr: learning rate of the source, from which the candidate's follow.
        seed: of the order of the windows.
        steps: after how many steps the loss was measured.
        losses: on held-out text then, in nats per token; null from where one was not finite.
    """

    lr: float
    seed: int
    steps: list[int]
    losses: list[float | None]


class ProbeCandidate(Result):
    """A candidate, or the source itself, trained on.

    Attributes:
        name: what it is called.
        source: whether it is the source.
        rank: from 1; null for one that was refused.
        outcome: ``ranked``; ``diverged``, where with every rate a loss was not finite; ``broken``,
            where growing broke a promise, so that it was not trained; or ``refused``, where it
            cannot be grown or trained.
        reason: why it is not ranked by its loss, in a sentence; null if it is.
        steps: of its recipe, as written there.
        promise: ``exact``, ``bounded`` or ``different``; null for the source, and if refused.
        parameters: number of its parameters; null if refused.
        step_flops: floating-point operations of a step; null if it was not trained.
        lr: the rate of the source with which it did best; null if it is not ranked by its loss.
        equal_step: the step in which it comes to the equal compute; null likewise.
        loss: at equal compute, in nats per token, mean over seeds; null likewise.
        spread: standard deviation of the same over seeds; null likewise.
        losses: the same of every seed; empty likewise.
        last_loss: after the last step, mean over seeds; null likewise.
        by_lr: the loss at equal compute with every rate, in the order of the settings; null where
            one was not finite; empty if it was not trained.
        curves: all of its trainings.
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
    """A difference of two losses.

    Attributes:
        difference: mean of all pairs, in nats per token.
        low: where the interval of this difference begins.
        high: where it ends.
        noise: whether it may be nothing: the interval holds 0, or rounding may have made it.
    """

    difference: float
    low: float
    high: float
    noise: bool


class ProbeDifference(PairedDifference):
    """By how much the loss of one is higher at equal compute.

    Attributes:
        better: the one with the lower mean loss.
        worse: the other one.
    """

    better: str
    worse: str


class ProbeResult(Result):
    """What a probe found, as ``--json`` prints it.

    Attributes:
        equal_compute: floating-point operations at which losses are compared, the smallest total
            that a training of those which are ranked took; null if none is.
        source: the source folder, or its name on the Hub.
        reason: what was found, in a sentence.
        early: whether at equal compute so few steps were taken, or a loss was so far above where it
            began, that the order means little; see ``warnings``.
        candidates: the source and the candidates by rank, those that were refused at the end.
        differences: of all pairs of those that are ranked by their loss.
        rule: when a difference is noise.
        steps: of every training.
        seeds: trainings of each with every rate.
        lr: learning rates that were tried, of the source.
        weight_decay: of all but norms and biases.
        warmup: steps until the rate was reached.
        batch: windows in a step.
        length: tokens in a window.
        dtype: torch name of the dtype that was computed in; weights and moments were float32.
        device: ``cpu`` or the name of the GPU.
        text: the text.
        text_sha256: of what was read of it.
        training_tokens: of the text, from which all trainings take theirs.
        held_out_tokens: of its last tenth, on which losses were measured.
        work: the folder with the grown models; null if they were thrown away.
        warnings: what should be known before anything is concluded.
        created: when it was over.
        seconds: how long it took, since it was taken up last.
        versions: of growkit and of what it ran with.
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


def difference_between(result: Mapping[str, Any], one: str, other: str) -> ProbeDifference | None:
    """The pair of two, whichever is better; None if they were not compared."""
    return next((each for each in result["differences"] if _names(each) == {one, other}), None)


def _names(pair: Mapping[str, Any]) -> set[str]:
    return {pair["better"], pair["worse"]}


def standing(result: Mapping[str, Any]) -> tuple[Any, Any, ProbeDifference | None]:
    """The source, the best candidate, and how far they are apart.

    The best candidate is the first that is ahead of the source by more than noise, or without one
    the first in the order.

    Returns:
        None for a candidate where none is ranked, and for a difference without two to compare.
    """
    source = next(each for each in result["candidates"] if each["source"])
    pairs = [
        (each, difference_between(result, each["name"], source["name"]))
        for each in result["candidates"]
        if each["outcome"] == "ranked" and not each["source"]
    ]
    ahead = (pair for pair in pairs if is_ahead(*pair))
    return (source, *next(ahead, pairs[0] if pairs else (None, None)))


def is_ahead(candidate: Any, apart: Mapping[str, Any] | None) -> bool:
    """Whether a candidate is ahead of the other of a pair by more than noise."""
    return bool(apart and apart["better"] == candidate["name"] and not apart["noise"])


def probe_sentence(result: Mapping[str, Any]) -> str:
    """What was found, in a sentence."""
    early = result["early"] and result["differences"]
    return f"{_found(result)}{'; so early, this means little, see the warnings' if early else ''}"


def _found(result: Mapping[str, Any]) -> str:
    source, best, apart = standing(result)
    if source["outcome"] != "ranked":
        return f"{source['name']} itself does not train, so nothing is compared: {source['reason']}"
    if best is None:
        return "no candidate was trained to its end; see the reason of each"
    assert apart is not None
    beyond, noise = "", "is more than noise"
    if apart["noise"]:
        beyond, noise = " beyond noise", "may be noise"
    loss = f"no candidate is ahead{beyond}: at equal compute the loss of the best, {best['name']},"
    tied = ""
    if is_ahead(best, apart):
        loss = f"{best['name']} is ahead: at equal compute its loss"
        like = [_names(pair) - {best["name"]} for pair in result["differences"] if pair["noise"]]
        names = [each["name"] for each in result["candidates"] if {each["name"]} in like]
        alike = ", ".join(name for name in names if name != source["name"])
        tied = f"; {alike} cannot be distinguished from it" if alike else ""
    where = "below" if apart["better"] == best["name"] else "above"
    return (
        f"{loss} is {nats(apart['difference'])} nats per token {where} that of {source['name']}, "
        f"trained further, which {noise}{tied}"
    )


def nats(value: float, sign: str = "") -> str:
    """A difference of losses with four decimals, or with two digits where these are zeros.

    Args:
        value: the difference.
        sign: ``+`` for a sign before positive ones as well.
    """
    small = value != 0 and abs(value) < 5e-4
    return f"{value:{sign}.1e}" if small else f"{value:{sign}.4f}"


def probe_next(result: Mapping[str, Any]) -> str:
    """What to do after a probe, in a sentence without its full stop."""
    source, best, apart = standing(result)
    if source["outcome"] != "ranked":
        return "probe again with a lower --lr, so that the source itself trains"
    if best is None:
        return "see below why each candidate was not ranked, and change or replace it"
    if result["early"]:
        return "probe again with more --steps, and as the warnings say"
    if is_ahead(best, apart):
        longer = " (probe with more --steps first, to see whether that lasts)"
        return f"grow the source by {best['name']}, and train the result{longer}"
    if apart is None or apart["noise"]:
        return "probe again with more --seeds and more --steps, so that less is noise"
    return "train the source further as it is; or probe with other candidates, or more --steps"
