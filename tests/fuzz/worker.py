"""Inputs run in a child process, which may die, hang or swell, and is replaced then."""

import faulthandler
import gc
import io
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from growkit.base.errors import InputError
from growkit.cli.command_building import print_message
from growkit.cli.commands import app
from growkit.extras.program_logits.logits_file import LogitsFile
from growkit.report import saving, terminal
from growkit.sources import find
from tests.fuzz.places import SECRET, Case, Place, build, remove, state
from tests.fuzz.rules import Answer, Fault, cause, judge

SECONDS = 5.0
WAIT = 12.0
"""Seconds of waiting for something, at most: other processes may have the machine meanwhile."""
MEMORY = 600 << 20
"""Bytes that an input may take beyond the 0.4 GiB that imports take: 1 GiB in all."""
PEAKS = 16
"""Inputs after which memory is looked at, which takes as long as a fourth of an input."""
ROOM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Memory, where it can be had as a folder: on a disk, writing takes as long as all the rest."""
LOADED = saving, terminal
"""What commands import late: once here, and not in every child."""
NOBODY = "/proc", "/dev/null"
RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
RUNS += ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "os.startfile", "os.fork")
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
WRITES += ("os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree", "os.mkfifo")
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def open_files(name: Path, number: int) -> int:
    """What every command does first: open a model, or logits, and read a few numbers.

    Returns:
        The exit code.
    """
    try:
        if name.is_file():
            logits = LogitsFile(name)
            logits.check_tokens(16)
            logits.log_probabilities(0, slice(0, 1), 16)
            return 0
        model = find(name).open()
        _ = model.sizes
        tensor = [*model.tensors][number % len(model.tensors)]
        model.read(tensor, *[slice(0, 1)] * min(len(model.tensors[tensor].shape), 1))
    except InputError as error:
        print_message(f"error: {error}")
        return 2
    return 0


@dataclass
class Found:
    """An input that broke a rule."""

    number: int
    target: str
    fault: Fault
    case: Case


@dataclass
class Tally:
    """How many inputs ran, by target and exit code, and which broke a rule."""

    inputs: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many inputs ran."""
        return sum(self.inputs.values())


Make = Callable[[int], tuple[str, Case]]


class Worker:
    """Runs inputs, one after another.

    Args:
        prepare: runs in the child before anything else, to break something on purpose, say.
    """

    def __init__(self, prepare: Callable[[], Any] = lambda: None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=ROOM)).resolve()
        for name in ("places", "tmp", "home"):
            (self.root / name).mkdir()
        self.places = build(self.root / "places")
        self.command: Any = typer.main.get_command(app)
        self.prepare = prepare

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)  # a killed child may not be gone yet

    def run(self, make: Make, first: int, end: int) -> Tally:
        """Run the inputs of some numbers.

        Args:
            make: makes an input of a number; is called in the child.
            first: the first number.
            end: the number after the last.
        """
        tally = Tally()
        while first < end:
            gc.freeze()
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    _Child(self, writing).run(make, first, end)
                except BaseException:
                    os.write(writing, json.dumps({"fell over": traceback.format_exc()}).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as stream:
                for told in map(json.loads, stream):
                    assert "fell over" not in told, told
                    first = told["number"] + 1
                    if "code" in told:
                        tally.inputs[told["target"], told["code"]] += 1
                    if "fault" in told:
                        fault, case = Fault(*told["fault"]), make(told["number"])[1]
                        tally.found.append(Found(told["number"], told["target"], fault, case))
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):  # an input ended it
                trace = (self.root / "fatal").read_text(errors="replace")
                target, case = make(first - 1)
                name = signal.Signals(os.WTERMSIG(status)).name
                tally.inputs[target, name] += 1
                fault = Fault(f"{name} {cause(trace)}", trace[:3000])
                tally.found.append(Found(first - 1, target, fault, case))
                self.places[case.place].restore()
                for left in (self.root / "tmp").iterdir():
                    remove(left)
        return tally


class _Child:
    """What runs in the child."""

    def __init__(self, worker: Worker, told: int) -> None:
        self.root, self.places, self.command = worker.root, worker.places, worker.command
        self.told = os.fdopen(told, "w", buffering=1)
        self.watching = self.reading = False
        self.strays: list[str] = []
        self.fatal = (self.root / "fatal").open("w")
        self.spill = os.open(self.root / "spill", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._settle()
        worker.prepare()

    def _settle(self) -> None:
        for number in (1, 2):  # what other libraries say, past Python
            os.dup2(self.spill, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
            faulthandler.register(number, file=self.fatal, all_threads=False, chain=True)
        faulthandler.enable(file=self.fatal, all_threads=False)
        tempfile.tempdir = str(self.root / "tmp")
        os.environ |= {"TMPDIR": tempfile.tempdir, "HOME": str(self.root / "home")}
        with open("/proc/self/statm") as stream:
            mapped = int(stream.read().split()[0]) * mmap.PAGESIZE
        self.most = _resident() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (3 << 30),) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.showwarning = _show  # not to whoever collects them in a test
        warnings.simplefilter("always")
        for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", ignored)
        gc.set_threshold(10_000)  # as the command does
        sys.addaudithook(self._audit)

    def run(self, make: Make, first: int, end: int) -> None:
        """Run inputs, until there is none or one has left much memory taken."""
        for number in range(first, end):
            target, case = make(number)
            told: dict[str, Any] = {"number": number, "target": target}
            self.told.write(json.dumps(told) + "\n")
            answer = self.answer(case)
            fault = judge(case.arguments, answer)
            at_times = number % PEAKS == 0 or number == end - 1
            if at_times and (peak := _peak()) > self.most:
                since = f"{peak >> 20} MiB, by one of the last {PEAKS} inputs"
                fault = fault or Fault("more than 1 GiB", since)
            told |= {"code": str(answer.code)}
            told |= {"fault": (fault.kind, fault.detail)} if fault else {}
            self.told.write(json.dumps(told) + "\n")
            if at_times and (peak > self.most or _resident() > self.most - (MEMORY >> 1)):
                return

    def answer(self, case: Case) -> Answer:
        """Run one input and put everything back."""
        place = self.places[case.place]
        os.chdir(place.folder)
        case.put(place)
        self.reading = case.arguments[:1] == ("open",)
        if self.reading:  # the audit sees that nothing is written, in a third of the time
            answer = self._called(case)
            for name in case.files:
                place.put(name, place.content(name))
            return answer
        before, outside = state(place.folder), self._outside()
        answer = self._called(case)
        after = state(place.folder)
        base = f"{place.folder}/"
        answer.made = [path.removeprefix(base) for path in after.keys() - before.keys()]
        answer.touched = [
            path.removeprefix(base) for path, was in before.items() if after.get(path) != was
        ]
        answer.strays += sorted(self._outside() ^ outside)
        answer.strays += [
            f"leaked into {name}" for name in answer.made if _leaks(place.folder / name)
        ]
        self._put_back(place)
        return answer

    def _called(self, case: Case) -> Answer:
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2)]
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams
        self.strays = []
        code: int | None = None
        crash = ""
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAIT)
        self.watching = True
        try:
            if self.reading:  # typer would take a fifth of the time
                code = open_files(Path(case.arguments[1]), int(case.arguments[2]))
            else:
                self.command.main(list(case.arguments), prog_name="growkit")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        except BaseException:
            crash = traceback.format_exc()
        finally:
            self.watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout, sys.stderr = own
        texts = []
        for stream in streams:
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        if os.fstat(self.spill).st_size:
            texts[1] += os.pread(self.spill, 10_000, 0).decode(errors="replace")
            os.ftruncate(self.spill, 0)
        return Answer(code, texts[0], texts[1], strays=self.strays, crash=crash)

    def _put_back(self, place: Place) -> None:
        os.chdir(self.root)
        place.restore()
        for left in (self.root / "tmp").iterdir():
            remove(left)

    def _outside(self) -> set[str]:
        places = {entry.path for entry in os.scandir(self.root / "places")}
        return places | {entry.path for entry in os.scandir(self.root / "tmp")}

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in RUNS:
            self.strays.append(f"{event} {arguments!r}"[:300])
            raise PermissionError(13, "not here", event)
        if event == "open":
            path, _, flags = arguments
            if flags & FLAGS:
                self._check(event, path, -1)
        elif event in WRITES:
            folder = arguments[-1] if len(arguments) > 1 else -1
            self._check(event, arguments[0], folder if isinstance(folder, int) else -1)

    def _check(self, event: str, path: Any, folder: int) -> None:
        if isinstance(path, int):
            return
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
        whole = os.path.join(base, os.fsdecode(path))
        real = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
        room = f"{self.root}/tmp/" if self.reading else f"{self.root}/"
        if not real.startswith((room, *NOBODY)):
            self.strays.append(f"{event} {real}"[:300])
            raise PermissionError(13, "not here", str(path))


def _leaks(path: Path) -> bool:
    """Whether something from outside of a model folder is in a new file."""
    return path.is_file() and SECRET[:40] in path.read_bytes()


def _show(
    message: Warning | str, category: type[Warning], file: str, line: int, *rest: Any
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, file, line))


def _resident() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * mmap.PAGESIZE


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def quickly() -> None:
    """Leave whole models out of proofs: saving, loading and generating take a while."""
    from growkit.proof import mode_results

    patch.object(mode_results, "run_whole_models", lambda *args: iter(())).start()
