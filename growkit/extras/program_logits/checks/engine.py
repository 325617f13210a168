"""Logits of the programs that ran the target, compared with those of the source."""

from growkit.extras.program_logits.judging import compare_engines
from growkit.extras.program_logits.logits_file import LogitsFile
from growkit.extras.program_logits.results.engine_result import EngineSection
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair


def refuse_file(pair: Pair) -> None:
    """Refuse a file that cannot be read.

    Raises:
        InputError: it is not a file of logits.
    """
    for path in pair.logits:
        LogitsFile(path)


def check_engines(pair: Pair, function: Function) -> EngineSection | None:
    """Compare the logits that programs computed with the target; None without any.

    If the target computes the same in strict float64, only the program can be at fault.
    """
    if not pair.logits:
        return None
    section = compare_engines(pair.before, pair.logits)
    for finding in section.findings:
        if finding.kept is False and function.kept:
            finding.sentence += "; the converted weights are not at fault"
    return section


CHECK = Check(check_engines, refuse_file)
