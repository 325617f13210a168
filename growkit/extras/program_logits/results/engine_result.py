"""Results of comparing logits that other programs computed."""

from growkit.results import Result
from growkit.results.proof_result import LayerError, Section


class TriedGuess(Result):
    """A mistake that was tried on the source.

    Attributes:
        guess: what the program would do.
        kl_nats_per_token: KL(source with this mistake ‖ program), to second order, mean over the
            positions that both have; null if it is not finite.
    """

    guess: str
    kl_nats_per_token: float | None


class EngineProgram(Result):
    """The logits of one program, compared with the source's class in strict float64.

    Attributes:
        program: name of the program, as its file has it.
        file: the file of its logits.
        sha256: SHA-256 of the file.
        dtype: torch name of the dtype in which it computed.
        positions: number of compared positions.
        columns: number of compared logits at a position, or of log-probabilities.
        verdict: ``rounding``; ``setting``, if a mistake explains its logits; or ``fault``.
        cause: the mistake that explains its logits, or those that they do not tell apart; null if
            none does.
        relative: largest difference of a log-probability, relative to the logit scale; null if it
            is not finite.
        tolerance: upper limit of ``relative``; null if the source computes nothing usable in the
            dtype.
        kl_nats_per_token: KL(source ‖ program), to second order, mean over positions; null if it is
            not finite.
        own_kl_nats_per_token: the same of the source's class in the program's dtype.
        inflation: rounding error of the program over that of the source's class; null for fewer
            than 32 positions, or in float32, where rounding depends on the order of sums.
        inflation_limit: upper limit of ``inflation``.
        first_differing_layer: the first layer whose output differs by more than rounding, or -1 for
            the embedding; null if none does, or without hidden states.
        by_layer: error of the states that the file has, root mean square relative to their scale.
        tried: all mistakes that were tried, the nearest first.
    """

    program: str
    file: str
    sha256: str
    dtype: str
    positions: int
    columns: int
    verdict: str
    cause: str | None = None
    relative: float | None = None
    tolerance: float | None = None
    kl_nats_per_token: float | None = None
    own_kl_nats_per_token: float | None = None
    inflation: float | None = None
    inflation_limit: float | None = None
    first_differing_layer: int | None = None
    by_layer: list[LayerError]
    tried: list[TriedGuess]


class EngineSection(Section):
    """Logits of other programs.

    Attributes:
        programs: the programs, in the order of their files.
        nearest: the one whose logits are nearest to strict float64, by a significant difference;
            null for one program, or if none is.
    """

    programs: list[EngineProgram]
    nearest: str | None = None


class EngineSections(Result):
    """The only section of a comparison without a target.

    Attributes:
        engine: the programs.
    """

    engine: EngineSection


class EngineResult(Result):
    """The verdict on logits alone, as ``growkit verify SRC --logits FILE --json`` prints it.

    Attributes:
        kept: whether rounding explains the logits of every program.
        verdict: ``rounding``, ``another setting`` or ``not preserved``.
        reason: the verdict in a sentence.
        sections: what was found.
        source: the source folder.
        created: date, ISO 8601 in UTC.
        seconds: duration.
        versions: versions of python, growkit, torch, transformers and safetensors.
    """

    kept: bool
    verdict: str
    reason: str
    sections: EngineSections
    source: str
    created: str
    seconds: float
    versions: dict[str, str]


PRINTED = (EngineResult,)
