"""What benchmarks share: processes with their time and memory, random models, rounds and tables."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Run:
    """A finished process.

    Attributes:
        seconds: by the clock.
        processors: seconds of processors.
        peak: bytes of resident memory.
        output: what it printed on stdout.
    """

    seconds: float
    processors: float
    peak: int
    output: str


def run(*command: object, checkout: Path | None = None) -> Run:
    """Run a command.

    Args:
        command: its words.
        checkout: growkit's code, if another than that of this process.
    """
    os.sync()  # nothing of the process before is still on its way to the disk
    words = list(map(str, command))
    search = {"PYTHONPATH": str(checkout)} if checkout else {}
    started = time.perf_counter()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | search, cwd=checkout
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(words)} failed")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def growkit(*words: object, checkout: Path | None = None) -> Run:
    """Run growkit; see ``run``."""
    return run(sys.executable, "-m", "growkit", *words, checkout=checkout)


def apart(function: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Call a function in a process of its own: a child's peak memory counts from its parent's."""
    process = Process(target=function, args=given, kwargs=named)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} failed")


def make_llama(folder: Path, dtype: str = "float32", **sizes: Any) -> Any:
    """Write a random Llama, in which no norm is one, and return it.

    Args:
        folder: to write.
        dtype: of its weights.
        sizes: of its config.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, dtype=dtype)).to(getattr(torch, dtype))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, until an accelerator is done."""
    import torch

    def wait() -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What all calls return in every round, one after the other; the first round only warms up."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            found[name] += [result] if number else []
    return found


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios of every round."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def machine(*packages: str) -> str:
    """The processor and the versions that figures come from."""
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {names}"
    )


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    """The head of a Markdown table."""
    return f"\n{row(*cells)}\n{row(*(['---'] * len(cells)))}"


def size_of(folder: Path, files: str = "*.safetensors") -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob(files) if file.is_file())


def by_name(values: Sequence[Any], name: str) -> list[Any]:
    """An attribute of all values."""
    return [getattr(value, name) for value in values]
