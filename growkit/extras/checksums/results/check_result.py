"""The result of checking a folder, in Python and as ``--json``."""

from growkit.results import Result


class Difference(Result):
    """A file that differs from the manifest's record.

    Attributes:
        file: path in the folder.
        what: ``missing``, ``extra``, ``changed`` or ``unreadable``.
        why: the reason why the file cannot be read; null if it can.
        recorded_bytes: recorded size, if the sizes differ; else null.
        found_bytes: present size, if the sizes differ; else null.
        recorded_sha256: recorded SHA-256, if only the hashes differ; else null.
        found_sha256: present SHA-256, if only the hashes differ; else null.
    """

    file: str
    what: str
    why: str | None = None
    recorded_bytes: int | None = None
    found_bytes: int | None = None
    recorded_sha256: str | None = None
    found_sha256: str | None = None


class CheckResult(Result):
    """A folder compared with its manifest, as ``--json`` prints it.

    Attributes:
        folder: the folder.
        whole: whether the folder holds every recorded file unchanged, and no other file.
        reason: the finding in a sentence.
        files: number of recorded files.
        bytes: total size of the recorded files.
        created: the folder's date in the manifest; null if it is not recorded.
        differences: every file that is missing, extra, changed or unreadable.
    """

    folder: str
    whole: bool
    reason: str
    files: int
    bytes: int
    created: str | None
    differences: list[Difference]


PRINTED = (CheckResult,)
