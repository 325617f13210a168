"""Runs that are killed, interrupted or given errors: what they leave behind, and what comes next.

Runs are children of this process, which has imported everything: so a run takes a moment, and can
end badly at any call of the system that it makes.
"""

import builtins
import errno
import hashlib
import io
import json
import logging
import mmap
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint import publishing
from tests.files import folder_bytes
from tests.models import save_model

DONE, REFUSED, INTERRUPTED, FAULTY = 0, 2, 130, 99

OS_CALLS = (
    *("open", "close", "read", "pwrite", "fsync", "mkdir", "rmdir", "unlink", "remove", "rename"),
    *("replace", "stat", "lstat", "fstat", "listdir", "scandir", "statvfs"),
)
CALLS = [*((os, name) for name in OS_CALLS), (builtins, "open"), (io, "open")]
CALLS += [(publishing, "_renameat2")]
ANYWHERE, PUBLISHING = "", "publishing"
CTRL_C = 0
ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EINTR, errno.EROFS),
    *(errno.EMFILE, errno.ENOENT, errno.ESTALE, errno.EBUSY, CTRL_C, CTRL_C),
)
Hook = Callable[[str, bool, Any], None]
"""Called with the name of a call, before it (False) and after it (True), and what it is about."""


class World:
    """A folder with a source, and what growths of it with two seeds must look like.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: Path) -> None:
        self.place = place / "beside"
        self.place.mkdir()
        self.temporary = place / "scratch"
        self.temporary.mkdir()
        self.verify: growkit.Settings | bool = False
        self.source = save_model(self.place / "source", "llama")
        self.out = self.place / "out"
        self.source_bytes = folder_bytes(self.source)
        self._earlier = place / "earlier"
        self._grown(0)
        self.out.rename(self._earlier)
        self.old = folder_bytes(self._earlier)
        self._grown(1)
        self.new = folder_bytes(self.out)
        shutil.rmtree(self.out)
        self._calls: dict[tuple[str, bool, bool, bool], int] = {}

    def _grown(self, seed: int) -> None:
        code, said = in_child(lambda: self.grow(seed))
        assert code == DONE, said

    def reset(self, *, overwrite: bool) -> None:
        """Only the source, and an earlier output if it is to be replaced."""
        for path in self.place.iterdir():
            if path != self.source:
                shutil.rmtree(path)
        for path in self.temporary.iterdir():
            shutil.rmtree(path)
        if overwrite:
            # As people copy it: other times, the same bytes.
            shutil.copytree(self._earlier, self.out)

    def grow(self, seed: int) -> None:
        """One run."""
        tempfile.tempdir = str(self.temporary)
        options = {"hidden": "x2", "seed": seed, "verify": self.verify, "overwrite": True}
        growkit.grow(self.source, self.out, **options)  # type: ignore[arg-type]

    def calls(self, inside: str, *, overwrite: bool, exchanging: bool) -> int:
        """The number of moments at which a run can fail; see ``count_calls``."""
        key = inside, overwrite, exchanging, bool(self.verify)
        if key not in self._calls:
            self.reset(overwrite=overwrite)
            self._calls[key] = count_calls(self.growing(exchanging), inside)
        return self._calls[key]

    def growing(self, exchanging: bool) -> Callable[[], None]:
        """One run, on a file system that can or cannot exchange names."""
        return partial(self.grow, 1) if exchanging else without_exchange(partial(self.grow, 1))

    def state(self) -> str:
        """``none``, ``old`` or ``new``; anything else is what may not be.

        Raises:
            AssertionError: the output is neither, or the source is not what it was.
        """
        assert folder_bytes(self.source) == self.source_bytes, "the source was changed"
        if not os.path.lexists(self.out):
            return "none"
        found = folder_bytes(self.out)
        if found == self.old:
            return "old"
        manifest = json.loads(found["growkit.json"])
        assert manifest["recipe"]["seed"] == 1
        others = found.keys() - {"growkit.json", "README.md"}
        assert others == self.new.keys() - {"growkit.json", "README.md"}
        assert all(found[name] == self.new[name] for name in others), "half-written"
        assert manifest["files"].keys() == found.keys() - {"growkit.json"}
        for name, (size, digest) in manifest["files"].items():
            assert len(found[name]) == size
            assert hashlib.sha256(found[name]).hexdigest() == digest
        return "new"

    def leftovers(self) -> dict[str, dict[str, bytes]]:
        """Everything next to the output that a run should not leave, by name."""
        beside = [path for path in self.place.iterdir() if path not in (self.source, self.out)]
        return {path.name: folder_bytes(path) for path in beside}

    def check_next_run(self) -> None:
        """A run after a bad one works, names what that one left, and does not touch it."""
        left = self.leftovers()
        code, said = in_child(lambda: self.grow(1))
        assert code == DONE, said
        assert self.state() == "new"
        assert self.leftovers() == left
        assert all(name in said for name in left), said

    def kill(self, where: str, overwrite: bool, exchanging: bool, moment: float) -> None:
        """Kill one run.

        Args:
            where: among which moments.
            overwrite: whether there is an earlier output.
            exchanging: whether the file system can exchange names.
            moment: when among these, from 0 to 1.

        Raises:
            AssertionError: something is lost, half-written, or not named by the next run.
        """
        number = int(moment * self.calls(where, overwrite=overwrite, exchanging=exchanging))
        self.reset(overwrite=overwrite)
        code, said = in_child(self.growing(exchanging), kill_at(number), where)
        assert code == -signal.SIGKILL, said
        state = self.state()
        if overwrite and not exchanging and state == "none":
            self.check_earlier()
        else:
            assert state in ("old" if overwrite else "none", "new"), state
        self.check_next_run()

    def check_earlier(self) -> None:
        """Between two renames the earlier output has another name, and is whole."""
        (earlier,) = (each for name, each in self.leftovers().items() if ".earlier-" in name)
        assert earlier == self.old

    def fail(self, chance: random.Random) -> None:
        """Let calls of the system of one run fail, or interrupt it.

        Raises:
            AssertionError: something is lost, half-written or not said.
        """
        overwrite, exchanging = chance.random() < 0.7, chance.random() < 0.7
        inside, code = chance.choice([ANYWHERE, PUBLISHING]), chance.choice(ERRORS)
        lasting = code != CTRL_C and chance.random() < 0.4
        count = self.calls(inside, overwrite=overwrite, exchanging=exchanging) // 2
        self.reset(overwrite=overwrite)
        number, run = chance.randrange(count), self.growing(exchanging)
        end, said = in_child(run, fail_at(self.place.parent, number, code, lasting), inside)
        what = f"{errno.errorcode.get(code, 'Ctrl-C')} at {number} {inside} {lasting}: {said}"
        state = self.state()
        if overwrite and not exchanging and state == "none":
            assert lasting or code == CTRL_C, what  # every further call failed as well
            self.check_earlier()
        else:
            assert state in ("old" if overwrite else "none", "new"), what
        assert end in (DONE, REFUSED, INTERRUPTED), what
        assert end != DONE or state == "new", what
        assert (end == INTERRUPTED) <= (code == CTRL_C), what
        if end == REFUSED:
            assert ("is written" in said) == (state == "new"), what
            assert len(said.strip().splitlines()) <= 2, what
        assert lasting or all(name in said for name in self.leftovers()), what
        assert "is written" not in said or state == "new", what
        self.check_next_run()


def kill_at(number: int) -> Hook:
    """Dies at the call of the system of this number, counted from 0."""
    left = iter(range(number))

    def hook(name: str, after: bool, about: object) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def fail_at(place: Path, number: int, code: int, lasting: bool) -> Hook:
    """Fails at the call of the system of this number, counted from 0, or from there on.

    What is about files elsewhere (those of Python itself, say) does not fail.
    """
    done = 0

    def hook(name: str, after: bool, about: object) -> None:
        nonlocal done
        if after or name == "close":  # which has happened, or frees what else would stay open
            return
        if isinstance(about, str | Path) and not Path(about).is_relative_to(place):
            return
        done += 1
        if done - 1 == number or (lasting and done > number):
            if code == CTRL_C:
                raise KeyboardInterrupt
            named = [str(about)] if isinstance(about, str | Path) else []
            raise OSError(code, os.strerror(code), *named)

    return hook


def in_child(run: Callable[[], Any], hook: Hook | None = None, inside: str = "") -> tuple[int, str]:
    """Carry something out in a child of this process.

    Args:
        run: what to do.
        hook: looks at every call of the system.
        inside: ``publishing`` to look only from where the output gets its name.

    Returns:
        How it ended (minus the signal that killed it), and what it said.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = FAULTY
        try:
            code = _carry_out(run, hook, inside, os.fdopen(writing, "w"))
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said


def _carry_out(run: Callable[[], Any], hook: Hook | None, inside: str, said: Any) -> int:
    logging.getLogger("growkit").addHandler(logging.StreamHandler(said))
    logging.getLogger("growkit").propagate = False
    code = DONE
    if hook and inside:
        become = publishing.Staging.publish

        def begin(*arguments: Any, **options: Any) -> Any:
            watch(hook)
            return become(*arguments, **options)

        publishing.Staging.publish = begin  # type: ignore[method-assign]
    elif hook:
        watch(hook)
    try:
        run()
    except KeyboardInterrupt as interrupt:
        code, words = INTERRUPTED, f"interrupted: {interrupt}"
    except (InputError, OSError) as error:
        code, words = REFUSED, str(error)
    except BaseException as error:
        code, words = FAULTY, repr(error)
    else:
        words = "done"
    said.write(f"{words}\n")
    said.flush()
    return code


def watch(hook: Hook) -> None:
    """From now on a hook sees the calls of the system that Python code makes; in children only."""
    for module, name in CALLS:
        setattr(module, name, _seen(getattr(module, name), name, hook))


def _seen(real: Callable[..., Any], name: str, hook: Hook) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        about = args[0] if args else None
        hook(name, False, about)
        result = real(*args, **kwargs)
        hook(name, True, about)
        return result

    return call


def count_calls(run: Callable[[], Any], inside: str = "") -> int:
    """How often the hook is called, in a run to which nothing happens."""
    count = mmap.mmap(-1, 8)

    def hook(name: str, after: bool, about: Any) -> None:
        count[:] = (int.from_bytes(count, "little") + 1).to_bytes(8, "little")

    code, said = in_child(run, hook, inside)
    assert code == DONE, said
    return int.from_bytes(count, "little")


def without_exchange(run: Callable[[], Any]) -> Callable[[], Any]:
    """A run on a file system that cannot exchange names; for children only."""

    def limited() -> None:
        publishing._renameat2 = lambda *arguments: False  # type: ignore[assignment]
        run()

    return limited
