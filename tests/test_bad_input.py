"""Runs that are refused, stopped or fail: one sentence, nothing lost and nothing half-written.

What users mistype is in ``tests.test_mistakes``; here is what needs a hand in the machine.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from growkit.cli.demo import MODEL
from growkit.model.checkpoint import writing
from tests.commands import cli, refusal
from tests.files import edit_weights, folder_bytes
from tests.models import save_model

GROW = ("--hidden", "x2")
UNPROVED = (*GROW, "--no-verify")
UP = "model.layers.1.mlp.up_proj.weight"


def refused(folder: Path, *arguments: object, command: str = "grow") -> str:
    """Run ``growkit grow SRC OUT …`` and return its sentence, after checking the manners.

    No file changes, and there is no new one.
    """
    before = folder_bytes(folder.parent)
    line = refusal(command, folder, *arguments)
    assert folder_bytes(folder.parent) == before
    return line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "place" / "source", "llama")


@pytest.fixture
def out(source: Path) -> Path:
    return source.parent / "out"


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.bfloat16), (float("inf"), torch.float16)], ids=str
)
def test_weights_that_are_no_numbers(
    value: float, dtype: torch.dtype, tmp_path: Path, out: Path
) -> None:
    """Large ones are, though the quick look at a sum overflows in float16."""
    source = save_model(tmp_path / "numbers" / "source", "llama", dtype=dtype)
    with edit_weights(source) as tensors:
        tensors[UP][:] = 60000.0
    assert cli("grow", source, out.with_name("large"), *UNPROVED).exit_code == 0
    with edit_weights(source) as tensors:
        tensors[UP][3] = value
    sentence = refused(source, out, *UNPROVED)
    assert UP in sentence
    assert "NaN" in sentence


# --- The output -----------------------------------------------------------------------------------


def test_missing_parents_are_made_and_tidied_up(source: Path) -> None:
    deep = source.parent / "a" / "b" / "out"
    assert cli("grow", source, deep, *UNPROVED).exit_code == 0
    assert (deep / "growkit.json").exists()
    with edit_weights(source) as tensors:
        tensors[UP][:] = float("nan")
    refused(source, source.parent / "c" / "d" / "out", *GROW)
    assert not (source.parent / "c").exists()


def test_a_disk_without_room_or_that_fills_up(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        sentence = refused(source, out, *GROW)
        assert "MB" in sentence
        assert str(out.parent) in sentence
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(writing.os, "pwrite", Mock(side_effect=full))
    assert "filled up" in refused(source, out, *GROW)


@pytest.mark.parametrize("there", ["elsewhere", "inside", "through it"])
def test_overwriting_keeps_the_old_output_until_the_new_one_is_proved(
    there: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT may be the current folder, and its path may lead through it."""
    assert cli("grow", source, out, *UNPROVED).exit_code == 0
    first, weights = folder_bytes(out), (source / "model.safetensors").read_bytes()
    if there != "elsewhere":
        monkeypatch.chdir(out)
    name = {"elsewhere": out, "inside": ".", "through it": "../out"}[there]
    with edit_weights(source) as tensors:
        tensors[UP][:] = float("nan")
    refused(source, name, *GROW, "--overwrite")
    assert folder_bytes(out) == first
    (source / "model.safetensors").write_bytes(weights)
    assert cli("grow", source, name, *UNPROVED, "--overwrite", "--seed", "1").exit_code == 0
    assert folder_bytes(out) != first
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


# --- Signals and errors ---------------------------------------------------------------------------

SLOWLY = """
import os, runpy, sys, threading, time
seconds, pwrite = float(sys.argv.pop(1)), os.pwrite
def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(seconds)
    return pwrite(*arguments)
os.pwrite = slow
runpy.run_module("growkit", run_name="__main__")
"""
"""growkit on a disk that takes so many seconds for every tensor."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("signum", "times", "code"),
    [
        (signal.SIGINT, 3, 130),  # more than one do not disturb the cleaning up
        (signal.SIGTERM, 1, 128 + signal.SIGTERM),
        (signal.SIGHUP, 0, 0),  # ignored by the parent, as under nohup
    ],
)
def test_signals_in_the_middle(signum: int, times: int, code: int, tmp_path: Path) -> None:
    """As soon as the temporary folder shows that weights are being written."""
    place = tmp_path / "place"
    source = save_model(place / "source", "llama")
    before = folder_bytes(place)

    def heeding() -> None:  # as in a terminal, also where tests run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL if times else signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "0.1", "grow", source, place / "out", *UNPROVED],
        preexec_fn=heeding,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(place.glob("out.partial-*/**/*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(max(times, 1)):
        process.send_signal(signum)
        time.sleep(0.02)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    if code:
        assert folder_bytes(place) == before
    assert sorted(path.name for path in place.iterdir()) == ["out", "source"][bool(code) :]


def test_internal_errors_are_no_broken_promise(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: 1 / 0)
    result = cli("grow", source, out, *UNPROVED)
    assert result.exit_code == 2
    assert "internal error" in result.stderr
    assert not out.exists()


def test_debug_shows_the_traceback(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the sentence; and the exit code stays."""
    plain = cli("grow", source, out, "--hidden", "x0")
    monkeypatch.setenv("GROWKIT_DEBUG", "1")
    result = cli("grow", source, out, "--hidden", "x0")
    assert result.exit_code == plain.exit_code == 2
    assert "Traceback" not in plain.stderr
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith(plain.stderr)


# --- verify ---------------------------------------------------------------------------------------


def test_a_target_needs_no_tokenizer(tmp_path: Path) -> None:
    """The source's makes the tokens that both are asked with."""
    bare = shutil.copytree(MODEL, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    quick = ["--text", __file__, "--prompts", "1", "--length", "12"]
    assert cli("verify", MODEL, bare, *quick).exit_code == 0
    assert "no tokenizer" in refused(bare, bare, *quick, command="verify")
