"""Names of folders: given where they are free, or exchanged in one step that nothing can divide."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_HERE = -100  # AT_FDCWD
_NOREPLACE, _EXCHANGE = 1, 2
_UNKNOWN = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})
"""What kernels, sandboxes and file systems answer that do not know the call."""


def move(source: Path, target: Path) -> None:
    """Give a file or folder a name that is free.

    Raises:
        FileExistsError: it is not free.
    """
    if not _renameat2(source, target, _NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders of one file system have each other's name, at once.

    Returns:
        Whether it was done: not every system or file system can.
    """
    return _renameat2(one, other, _EXCHANGE)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """See rename(2); False where there is no such call."""
    call = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name != "nt" else None
    )
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
