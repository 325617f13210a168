"""What an operation reports: the result that Python returns and ``--json`` prints."""

from __future__ import annotations

from pathlib import Path

from growkit.errors import InputError
from growkit.results.planned import ConfigChange, Estimate, RankTried
from growkit.results.proof import VerifyResult
from growkit.results.result import Result
from growkit.results.updates import Updates


class PlannedTensor(Result):
    """One line of a dry run: a tensor of the output, and how it comes about.

    Attributes:
        tensor: its name in the output.
        sources: names of the source's tensors that it is made of.
        source_shapes: the shapes of these.
        shape: its own.
        dtype: as safetensors names it, e.g. ``BF16``.
        why: what is done, step by step.
    """

    tensor: str
    sources: list[str]
    source_shapes: list[list[int]]
    shape: list[int]
    dtype: str
    why: str


class OptimizerResult(Result):
    """What became of an optimizer's state.

    Attributes:
        path: the file or folder that it was read from.
        format: of the files, as they were read and are written.
        moments: the kinds of tensors that grow with the weights.
        step: the most steps that a parameter has taken; null where they are not counted.
        groups: the number of parameter groups, in the source's state in a dry run.
        bytes: size of its tensors, about that in a dry run.
        reset: parameters that begin without moments, and why; empty in a dry run.
        beside: what else of a training lies with the state, and what becomes of it.
        assumed: the order of the parameters that was assumed, because the files do not name them;
            empty if they do.
    """

    path: str
    format: str
    moments: list[str]
    step: int | None
    groups: int
    bytes: int
    reset: dict[str, str]
    beside: dict[str, str]
    assumed: str


class GrowResult(Result):
    """What an operation did, as ``--json`` prints it.

    Attributes:
        source: the source folder.
        output: the folder that was written (``OUT.rejected`` if a promise was broken), or would be.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what is lost, in one line; null if nothing is.
        kept: whether the proof held; null if there was none (dry run, ``--no-verify``).
        source_parameters: number of parameters of the source, ties counted once.
        parameters: the same of the output.
        bytes: size of the output's tensors.
        dtype: torch name of the dtype that holds most of them.
        rounded: the dtype to which the source was rounded, once, before all else, because a
            narrower one was asked for; what is promised holds of the rounded source. Null if
            nothing was rounded so.
        loads_with: what runs the output, where that is not transformers as it is; else null.
        copies: for each step, the number of copies of every grown axis.
        write_seconds: from reading the first tensor to writing the last; null in a dry run.
        dry_run: whether nothing was written.
        plan: in a dry run, every tensor of the output; else empty.
        dropped: source tensors that are not in the output, and why.
        config: what of ``config.json`` is another in the output.
        ranks: the ranks that were tried, where one was searched for.
        warnings: what should be known before the output is used.
        estimate: in a dry run, what a run would take; else null.
        updates: how to go on training; null in a dry run.
        verification: the verdict; null if there was none.
        optimizer: what became of the optimizer's state; null if none was given.
    """

    source: str
    output: str
    promise: str
    lost: str | None
    kept: bool | None
    source_parameters: int
    parameters: int
    bytes: int
    dtype: str
    rounded: str | None
    loads_with: str | None
    copies: list[dict[str, int]]
    write_seconds: float | None
    dry_run: bool
    plan: list[PlannedTensor]
    dropped: dict[str, str]
    config: list[ConfigChange]
    ranks: list[RankTried]
    warnings: list[str]
    estimate: Estimate | None
    updates: Updates | None
    verification: VerifyResult | None
    optimizer: OptimizerResult | None

    def save_report(self, file: str | Path) -> None:
        """Write the proof as a report; see ``VerifyResult.save_report``.

        Raises:
            InputError: see there; or there was no proof.
        """
        from growkit.report.saving import save_report

        if self.verification is None:
            raise InputError(
                f"{self.output} was not proved, so there is no report; verify it first"
            )
        save_report(self.verification, file, self.output)
