"""What growkit does on a GPU: its tests, arithmetic, proofs of a few models, speed of attention.

    python benchmarks/gpu.py [--results FILE.md] [--device auto|cpu|cuda|xpu|…] [--quick]

For a machine with an accelerator of torch whose Python has torch, transformers, typer and pytest.
Nothing is installed, nothing is fetched. Every part is a process of its own with a limit of time,
all together take less than nine minutes, and the file is written anew after every part: what was
measured stays, whatever happens next. Exit codes: 0 everything held, 1 something did not or came to
no end, 2 there is no such device, and nothing was written.

``--device cpu --quick`` rehearses all of it with tiny models, to see that it runs. Its figures say
nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 520
"""For everything, from the first process on."""

HEAD = [
    "| model | verdict | strict float64 | limit | in its dtype | limit | s | peak GPU memory, GB |"
]
HEAD.append("| " + " | ".join(["---"] * 8) + " |")


@dataclass
class Part:
    """One process.

    Attributes:
        title: heading of its section.
        command: arguments of Python.
        seconds: after which it is stopped.
        told: from what it printed on stdout and on stderr to Markdown.
    """

    title: str
    command: list[str]
    seconds: float
    told: Callable[[str, str], list[str]]


@dataclass
class Results:
    """The file, section by section."""

    file: Path
    lines: list[str]
    broken: list[str] = field(default_factory=list)

    def add(self, part: Part, deadline: float) -> None:
        """Run a part, and write down what it said."""
        print(f"{part.title} …", file=sys.stderr, flush=True)
        started = time.monotonic()
        limit = max(min(part.seconds, deadline - started), 1)
        code, out, err = run(part.command, limit)
        seconds = time.monotonic() - started
        ending = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
        self.lines += ["", f"## {part.title}", "", f"{seconds:.0f} s, {ending}.", ""]
        self.lines += part.told(out, err)
        if code != 0:
            self.broken.append(f"{part.title}: {ending}")
            self.lines += ["", "```text", *(out + err).splitlines()[-40:], "```"]
        self.file.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def run(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code (None if it had to be stopped), stdout and stderr of a Python process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=out, stderr=err
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def tests(device: str, quick: bool) -> Part:
    """All that are marked ``gpu``; a rehearsal only sees whether they can be collected."""
    marked = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").glob("test_*.py"))
        if "@pytest.mark.gpu" in file.read_text(encoding="utf-8")
    ]
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-rA", "-q"]
    chosen = marked[:1] if quick else marked

    def told(out: str, err: str) -> list[str]:
        ended = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (.+)$", out, re.MULTILINE)
        return [f"- {word.lower()}: `{name}`" for word, name in ended]

    return Part("Tests marked gpu", [*command, *chosen], 100, told)


def arithmetic(device: str, quick: bool) -> Part:
    command = [__file__, "--arithmetic", "--device", device, *(["--quick"] if quick else [])]
    return Part("Arithmetic", command, 40, lambda out, err: out.splitlines())


def compute(device: str, quick: bool) -> int:
    """Print what is seen of a device's arithmetic, as the proof sets it and as it may be set."""
    import torch

    from growkit.engine.device import DIGITS, find_arithmetic_fault, reproducible

    place, cuda = torch.device(device), torch.backends.cuda.matmul
    shapes = {(48, 256, 64)} if quick else {(1, 4096, 4096), (512, 4096, 11008)}
    settings = {
        "fp32_precision": ("tf32", torch.float32),
        "allow_bf16_reduced_precision_reduction": (True, torch.bfloat16),
        "allow_fp16_reduced_precision_reduction": (True, torch.float16),
        "allow_fp16_accumulation": (True, torch.float16),
    }
    with reproducible(place):
        for dtype in DIGITS:
            print(
                f"- {dtype}: {find_arithmetic_fault(place, dtype, shapes) or 'no fault'}",
                flush=True,
            )
        for name, (value, dtype) in settings.items():
            before = getattr(cuda, name)
            setattr(cuda, name, value)
            seen = find_arithmetic_fault(place, dtype, shapes)
            setattr(cuda, name, before)
            print(f"- {dtype} with {name} = {value}: {seen or 'not seen'}", flush=True)
    return 0


def proofs(device: str, quick: bool) -> Part:
    command = [__file__, "--proofs", "--device", device, *(["--quick"] if quick else [])]

    def told(out: str, err: str) -> list[str]:
        lines = out.splitlines()
        rows, others = ([line for line in lines if line.startswith(mark)] for mark in ("| ", "- "))
        return [*HEAD, *rows, *([""] if others else []), *others]

    return Part("Proofs", command, 240, told)


def attention(device: str, quick: bool) -> Iterator[Part]:
    """One process for every length, so that the long one cannot cost the figures of the short."""
    script = str(ROOT / "benchmarks" / "attention_speed.py")
    for length in (64,) if quick else (4096, 16384):
        rounds = "1" if quick else "3"
        command = [script, "--device", device, "--rounds", rounds, "--lengths", str(length)]

        def told(out: str, err: str) -> list[str]:
            figures = re.sub(r"^#", "##", out[out.find("\n") :], flags=re.MULTILINE).strip()
            return figures.splitlines() or [line for line in err.splitlines() if line[:2] == "- "]

        yield Part(f"Attention, {length} tokens", command, 70, told)


def whole_models(device: str, quick: bool) -> Part:
    """Random models of a billion parameters, uncompiled."""
    command = [str(ROOT / "benchmarks" / "model_speed.py"), "--device", device]
    command += ["--quick", "--layers", "1"] if quick else []
    return Part("Whole models", command, 90, lambda out, err: out.strip().splitlines())


def machine(device: str) -> str:
    """Processor, device, driver, versions."""
    import torch

    from growkit.engine.device import device_name, driver_versions, memory_of

    names = ("torch", "transformers", "safetensors", "numpy", "pytest")
    told = [f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"]
    if device != "cpu":
        place = torch.device(device)
        told += [f"{device_name(place)} ({memory_of(place) / 1e9:.0f} GB)"]
        told += [f"{name} {version}" for name, version in driver_versions(place).items()]
    told += [f"{platform.machine()}, {os.cpu_count()} cores", f"Python {platform.python_version()}"]
    return ", ".join([*told, *(f"{name} {version_of(name)}" for name in names)])


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


@dataclass
class Model:
    """A model that is made, changed and proved.

    Attributes:
        config: of a random source; None for the model that ships with growkit.
        change: options of a growth, or of a conversion.
    """

    name: str
    config: Callable[[], Any] | None
    change: dict[str, Any]


def models(quick: bool) -> list[Model]:
    """From small to large, with every kind of attention among them."""
    from transformers import DiffLlamaConfig, LlamaConfig, MistralConfig

    tiny: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    tiny |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    large: dict[str, Any] = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816}
    large |= {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = tiny if quick else large
    grown = {"hidden": "x2"}
    grouped = {"method": "group-diff", "hidden": "x2", "signal_heads": "x4"}
    return [
        Model("Llama, twice as wide", lambda: LlamaConfig(**sizes), grown),
        Model("the demo's DiffLlama, 1:1 to 4:1", None, grouped),
        Model(
            "Mistral, a window of 256", lambda: MistralConfig(**sizes, sliding_window=256), grown
        ),
        Model("DiffLlama, 1:1 to 4:1", lambda: DiffLlamaConfig(**sizes), grouped),
        Model("Llama to DIFF V2", lambda: LlamaConfig(**sizes), {"to": "diff-v2"}),
        Model("DiffLlama to DINT, gated", lambda: DiffLlamaConfig(**sizes), {"to": "dint"}),
    ]


def prove(device: str, quick: bool) -> int:
    """Make, prove and spoil every model; print its line of the table as soon as it is done."""
    import torch
    from transformers import AutoModelForCausalLM

    import growkit
    from growkit.cli.demo import MODEL

    amount: dict[str, Any] = {"prompts": 2, "length": 32} if quick else {}
    held = True
    for model in models(quick):
        with tempfile.TemporaryDirectory() as scratch:
            source, target = Path(scratch) / "source", Path(scratch) / "target"
            if model.config is None:
                source = MODEL
            else:
                torch.manual_seed(0)
                made = AutoModelForCausalLM.from_config(model.config())
                made.to(torch.float32 if quick else torch.bfloat16).save_pretrained(source)
            make = growkit.convert if "to" in model.change else growkit.grow
            make(source, target, verify=False, **model.change)
            if device != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            started = time.perf_counter()
            sound = growkit.verify(source, target, device=device, **amount)
            seconds = time.perf_counter() - started
            peak = torch.accelerator.max_memory_allocated() / 1e9 if device != "cpu" else None
            spoil(target)
            spoiled = growkit.verify(source, target, device=device, prompts=2, length=32)
        held &= sound["kept"] and not spoiled["kept"]
        print(line_of(model.name, sound, spoiled, seconds, peak), flush=True)
        told = [each["sentence"] for each in sound.findings if each["name"] == "device"]
        told += [
            f"{m['name']}: {m['note']}"
            for m in sound.sections.modes.modes
            if "attention: " in m["name"]
        ]
        for each in told:
            print(f"- {model.name}: {each}", flush=True)
    return 0 if held else 1


def spoil(folder: Path) -> None:
    """The control: one matrix times 1.01."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def line_of(name: str, sound: Any, spoiled: Any, seconds: float, peak: float | None) -> str:
    strict, native = sound.sections.logits.strict_float64, sound.sections.logits.native
    words = ["preserved" if sound["kept"] else "NOT PRESERVED"]
    words.append("a fault is missed" if spoiled["kept"] else "a fault is caught")
    cells = [name, ", ".join(words)]
    figures = [part[key] for part in (strict, native) for key in ("relative", "tolerance")]
    cells += ["–" if figure is None else f"{figure:.1e}" for figure in figures]
    cells += [f"{seconds:.1f}", "" if peak is None else f"{peak:.2f}"]
    return f"| {' | '.join(cells)} |"


def missing(device: str) -> str:
    """Why nothing can be measured here, in a sentence; empty if it can."""
    needed = ("torch", "transformers", "safetensors", "typer", "rich", "yaml", "numpy", "pytest")
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        return f"{sys.executable} has no {', '.join(absent)}; install it, or name another Python"
    if device == "auto":
        return "torch finds no accelerator; run this on a machine that has one"
    return ""


def accelerator() -> str:
    """The name of torch's accelerator; ``auto`` if there is none."""
    if find_spec("torch") is None:
        return "auto"
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else "auto"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="default: GPU_RESULTS, or DATE-gpu.md")
    parser.add_argument("--device", default="auto", help="auto, cpu, or the accelerator's name")
    parser.add_argument("--quick", action="store_true", help="tiny models, few tokens")
    parser.add_argument("--proofs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--arithmetic", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    device, quick = arguments.device, arguments.quick
    device = accelerator() if device == "auto" else device
    reason = missing(device)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    if arguments.proofs:
        return prove(device, quick)
    if arguments.arithmetic:
        return compute(device, quick)
    if arguments.machine:
        print(machine(device))
        return 0
    deadline = time.monotonic() + SECONDS
    today = datetime.datetime.now().astimezone().date()
    usual = os.environ.get("GPU_RESULTS") or ROOT / "benchmarks" / "results" / f"{today}-gpu.md"
    title = "# A rehearsal without a GPU" if device == "cpu" else "# growkit on a GPU"
    # Another process: some GPUs take one at a time.
    _, out, err = run([__file__, "--machine", "--device", device], 60)
    results = Results(arguments.results or Path(usual), [title, "", f"{(out or err).strip()}."])
    parts = (each(device, quick) for each in (tests, arithmetic, proofs))
    for part in (*parts, *attention(device, quick), whole_models(device, quick)):
        results.add(part, deadline)
    print(f"written to {results.file}", file=sys.stderr)
    for each in results.broken:
        print(each, file=sys.stderr)
    return 1 if results.broken else 0


if __name__ == "__main__":
    sys.exit(main())
