"""What ``growkit check`` reports: whether a folder is what its manifest recorded."""

from __future__ import annotations

from growkit.results.result import Result


class Difference(Result):
    """One file that is not what the manifest recorded.

    Attributes:
        file: its path in the folder.
        what: ``missing``, ``extra``, ``changed`` or ``unreadable``.
        why: of a file that cannot be read, why not; else null.
        recorded_bytes: its size in the manifest, where that is another; else null.
        found_bytes: its size now, where that is another; else null.
        recorded_sha256: its SHA-256 in the manifest, where size is the same and that is not; else
            null.
        found_sha256: its SHA-256 now, where size is the same and that is not; else null.
    """

    file: str
    what: str
    why: str | None
    recorded_bytes: int | None
    found_bytes: int | None
    recorded_sha256: str | None
    found_sha256: str | None


class CheckResult(Result):
    """Whether a folder is what its manifest recorded, as ``--json`` prints it.

    Attributes:
        folder: the folder.
        whole: whether every recorded file is there as it was written, and nothing else.
        reason: the same in a sentence.
        files: number of files that were recorded.
        bytes: size of these together.
        created: when the folder was made, as its manifest says; null if it does not.
        differences: every file that is missing, extra, changed or unreadable.
    """

    folder: str
    whole: bool
    reason: str
    files: int
    bytes: int
    created: str | None
    differences: list[Difference]


def difference(
    file: str,
    what: str,
    why: str | None = None,
    sizes: tuple[int, int] | None = None,
    hashes: tuple[str, str] | None = None,
) -> Difference:
    """A difference; sizes and hashes as they were recorded and as they were found."""
    return Difference(
        file=file,
        what=what,
        why=why,
        recorded_bytes=sizes and sizes[0],
        found_bytes=sizes and sizes[1],
        recorded_sha256=hashes and hashes[0],
        found_sha256=hashes and hashes[1],
    )


def difference_sentence(found: Difference) -> str:
    """A difference on one line."""
    if found.recorded_sha256 is not None:
        more = f" (SHA-256 {found.recorded_sha256} was recorded, {found.found_sha256} found)"
    elif found.recorded_bytes is not None:
        more = f" ({found.recorded_bytes:,} bytes were recorded, {found.found_bytes:,} found)"
    else:
        more = f" ({found.why})" if found.why else ""
    return f"{found.what}: {found.file}{more}"
