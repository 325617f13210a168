"""Publishing: a folder gets its name only when it is complete and proved."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from growkit.errors import InputError

MANIFEST = "growkit.json"

# What a model folder carries beside weights and config, and what growth leaves as it is.
CARRIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates",
    "preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def carry_over(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer and its like; return the names of what was copied."""
    names = sorted({path.name for pattern in CARRIED for path in source.glob(pattern)})
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        else:
            shutil.copyfile(source / name, folder / name)
    return names


def check_output(output: Path, source: Path, overwrite: bool) -> None:
    """Refuse an output that exists (unless growkit wrote it and may overwrite it) or is the source.

    Raises:
        InputError: with what to do about it.
    """
    resolved, origin = output.resolve(), source.resolve()
    if resolved == origin or resolved in origin.parents or origin in resolved.parents:
        raise InputError(f"{output} and the source {source} overlap; choose another output folder")
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise InputError(f"{output} already exists; choose another name or pass --overwrite")
    if not replaceable(output):
        raise InputError(
            f"{output} was not written by growkit, so it is not overwritten; "
            "move it away or choose another name"
        )


def replaceable(folder: Path) -> bool:
    """Whether a folder holds nothing, or something that growkit wrote."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and ((folder / MANIFEST).exists() or not any(folder.iterdir()))
    )


def check_space(output: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        InputError: the file system of ``output`` has fewer than ``needed`` bytes left.
    """
    existing = next(path for path in output.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise InputError(
            f"{output} needs {needed / 1e9:.2f} GB and {existing} has {free / 1e9:.2f} GB left; "
            "free some space or choose another disk"
        )


@contextmanager
def staged(output: Path) -> Iterator[Staging]:
    """A temporary folder beside ``output``, which vanishes unless it is published or set aside.

    Raises:
        InputError: the folder cannot be made, or the disk is full.
    """
    missing = [path for path in output.absolute().parents if not path.exists()]
    staging = Staging(output, output.absolute().parent / f".{output.name}.{secrets.token_hex(4)}")
    try:
        staging.folder.mkdir(parents=True)
        yield staging
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"the disk filled up while writing {output}; nothing was kept, free some space"
            ) from error
        raise InputError(
            f"{output} cannot be written ({error.strerror}: {error.filename}); "
            "choose a folder that you may write to"
        ) from error
    finally:
        if not staging.settled:
            shutil.rmtree(staging.folder, ignore_errors=True)
            for parent in missing:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()


class Staging:
    """The folder that is being written, and the name it may get."""

    def __init__(self, output: Path, folder: Path) -> None:
        self.output = output
        self.folder = folder
        self.settled = False

    def publish(self) -> Path:
        """Give the folder its final name."""
        return self._become(self.output)

    def reject(self) -> Path:
        """Set the folder aside as ``OUT.rejected``, so that what went wrong can be looked at."""
        return self._become(self.output.with_name(f"{self.output.name}.rejected"))

    def _become(self, final: Path) -> Path:
        previous = None
        if final.exists():
            if not replaceable(final):
                raise InputError(f"{final} is in the way; move it away and try again")
            previous = final.rename(self.folder.with_name(f"{self.folder.name}.previous"))
        self.folder.rename(final)
        self.settled = True
        if previous:
            shutil.rmtree(previous)
        return final
