"""What must have reached the disk before something else does: a file's data before its name."""

from __future__ import annotations

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
