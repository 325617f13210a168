"""What the file system does at once or for certain: flush to the disk, move, swap two names."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_UNKNOWN = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})
"""What file systems answer that cannot do this for folders."""


def flush(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":  # where folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in _UNKNOWN:
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """The same for everything in a folder, and then for the folder: data before names."""

    def stop(error: OSError) -> None:
        raise error

    for where, _, files in os.walk(folder, topdown=False, onerror=stop):
        for name in files:
            flush(Path(where, name))
        flush(Path(where))


_HERE = -100  # AT_FDCWD
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})
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


def atomic_swap(one: Path, other: Path) -> bool:
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
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
