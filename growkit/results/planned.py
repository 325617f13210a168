"""What is known of a run before anything is written."""

from __future__ import annotations

from growkit.results.result import Result


class ConfigChange(Result):
    """A key of ``config.json`` that is another one in the output.

    Attributes:
        key: its name.
        before: its value in the source, as JSON; null where the source has none.
        after: its value in the output, as JSON; null where the output has none.
    """

    key: str
    before: str | None
    after: str | None


class Estimate(Result):
    """What a run will take.

    Attributes:
        disk_needed: bytes that the output needs; it is written beside an earlier one.
        disk_free: bytes that its disk has left.
        memory: bytes of memory, at most about.
        write_seconds: about how long writing takes.
        proof_seconds: about how long the proof takes; null if there is none.
        basis: what memory and times rest on.
    """

    disk_needed: int
    disk_free: int
    memory: int
    write_seconds: float
    proof_seconds: float | None
    basis: str


class LargePlan(Result):
    """What a recipe takes, as ``growkit plan`` prints it.

    Attributes:
        source: the source folder, or its name on the Hub.
        output: the folder that would be made.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what is lost, in one line; null if nothing is.
        source_parameters: number of parameters of the source.
        parameters: the same of the output.
        dtype: torch name of the dtype that holds most of them.
        bandwidth: bytes per second that can be read and written; null for no limit.
        read: bytes of the source's tensors.
        disk_needed: bytes that the output takes.
        files: number of files with weights.
        largest_file: bytes of the largest one.
        memory: bytes of memory that writing takes, at most about.
        write_seconds: about how long writing takes.
        proof_seconds: about how long the proof takes; null if there is none.
        basis: what memory and times rest on.
        warnings: what should be known before a run.
    """

    source: str
    output: str
    promise: str
    lost: str | None
    source_parameters: int
    parameters: int
    dtype: str
    bandwidth: int | None
    read: int
    disk_needed: int
    files: int
    largest_file: int
    memory: int
    write_seconds: float
    proof_seconds: float | None
    basis: str
    warnings: list[str]


class RankTried(Result):
    """A rank that was tried in a search, and what it costs.

    Attributes:
        layer: the layer that it is for, counted from 0; null for all layers alike.
        rank: of the updates.
        kl_nats_per_token: what it costs, where the search was for a tolerance; else null.
        energy: the share that it keeps, where the search was for an energy; else null.
        chosen: whether it is the one that was found.
    """

    layer: int | None
    rank: int
    kl_nats_per_token: float | None
    energy: float | None
    chosen: bool
