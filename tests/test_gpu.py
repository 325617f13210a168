"""A GPU that nobody here has: ``make gpu`` is rehearsed on a CPU, proofs on a pretended one."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from benchmarks import gpu
from growkit.proof.modes import ATTENTION
from tests.faults import DONE, in_child
from tests.wrong_arithmetic import KINDS


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert gpu.main(["--results", str(tmp_path / "gpu.md")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "no accelerator" in printed.err
    assert not printed.out
    assert not list(tmp_path.iterdir())


def test_proofs_are_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = gpu.models(quick=True)[4:5]  # a conversion that is exact
    monkeypatch.setattr(gpu, "models", lambda quick: some)
    assert gpu.prove("cpu", quick=True) == 0
    line = capsys.readouterr().out
    table = gpu.proofs("cpu", quick=True).told(line, "")
    assert len(table) == 2 + len(some)
    assert all("| preserved, a fault is caught | " in row for row in table[2:])
    assert {row.count("|") for row in table} == {9}
    monkeypatch.setattr(gpu, "spoil", lambda folder: None)  # the control
    assert gpu.prove("cpu", quick=True) == 1
    assert "a fault is missed" in capsys.readouterr().out


def test_what_was_measured_stays(tmp_path: Path) -> None:
    """A part that comes to no end is stopped; what it said and all before it is in the file."""
    file = tmp_path / "gpu.md"
    results = gpu.Results(file, ["# Title"])

    def part(title: str, code: str, seconds: float = 20) -> gpu.Part:
        return gpu.Part(title, ["-c", code], seconds, lambda out, err: out.splitlines())

    started = time.monotonic()
    results.add(part("sound", "print('figure 1')"), started + 30)
    results.add(part("endless", "print('figure 2'); import time; time.sleep(60)", 1), started + 30)
    results.add(part("wrong", "print('figure 3'); raise SystemExit(3)"), started + 30)
    results.add(part("too late", "print('figure 4'); import time; time.sleep(60)"), started)
    assert time.monotonic() - started < 15
    assert [each.split(":")[0] for each in results.broken] == ["endless", "wrong", "too late"]
    text = file.read_text(encoding="utf-8")
    assert [f"figure {number}" in text for number in (1, 2, 3)] == [True] * 3
    assert "stopped after 1 s" in text
    assert "exit code 3" in text


def test_a_proof_on_a_device(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One test, as workers would each run all of it. Pairs and controls are nightly."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot pretend a device")
    every, file = request.config.getoption("--all"), tmp_path / "found.json"

    def prove() -> None:
        from tests.pretend_gpu import prove_pairs

        file.write_text(json.dumps(prove_pairs(tmp_path, 0 if every else 1), default=str))

    assert in_child(prove) == (DONE, "done\n")
    found: Any = json.loads(file.read_text())
    check_wrong(found.pop("wrong"), 0 if every else 1)
    if not every:
        return
    left_behind = found.pop("left behind")  # the control
    assert not left_behind["kept"]
    assert "same device" in left_behind["reason"]
    for dtype, kept, doubted in found.pop("sums"):
        assert doubted == ("float16" in kept), (dtype, kept)
    assert len(found) == 8
    for name, each in found.items():
        assert each["kept"] == name.endswith("sound"), name
        kernels = {mode["name"]: mode for mode in each["modes"] if ATTENTION in mode["name"]}
        assert kernels.keys() == {f"{ATTENTION}{kernel}" for kernel in KERNELS}
        assert all("runs gave the same bits" in mode["note"] for mode in kernels.values())
        if name.endswith("sound"):
            assert each["device"] == "strict float64 ran on pretended"
            assert None not in each["losses"]
    for name in ("grouped", "llama"):
        on_gpu, elsewhere = found[f"{name}, sound"]["products"]
        assert on_gpu > 100
        assert elsewhere == 0
        fault = found[f"{name}, spoiled"]["fault"]
        assert fault["tensor"] == "model.layers.1.self_attn.o_proj.weight"
        assert fault["factor"] == pytest.approx(1.01, rel=1e-6)
        assert "CPU had to confirm" in found[f"{name}, spoiled"]["device"]


def check_wrong(found: list[dict[str, Any]], count: int) -> None:
    """What was proved with wrong arithmetic; of all kinds for a count of 0."""
    lacking = [each for each in found if "why" in each]
    unchecked = [each for each in found if not {"why", "kind"} & each.keys()]  # the control
    wrong = [each for each in found if "kind" in each]
    for pair in lacking:
        assert [pair[state]["kept"] for state in ("sound", "faulty")] == [True, False]
        assert f"ran on the CPU, since on pretended {pair['why']}" in pair["sound"]["device"]
    for pair in unchecked:
        assert [pair[state]["kept"] for state in ("sound", "faulty")] == [False, True]
    assert (len(lacking), len(unchecked)) == ((0, 0) if count else (2, 1))
    assert len(wrong) == (count or sum(len(strengths) for strengths, _ in KINDS.values()))
    for each in wrong:
        assert not each["faulty"]["kept"], each
        assert each["sound"]["kept"] or "pretended" in each["sound"]["reason"], each
        if each["kind"] in NEVER_DOUBTED | ALWAYS_DOUBTED:
            assert any(each["doubts"]) == (each["kind"] in ALWAYS_DOUBTED), each
        if each["kind"] in NEVER_DOUBTED:
            assert each["sound"]["device"] == "strict float64 ran on pretended"


KERNELS = ("as chosen", "eager", "math", "flash")
NEVER_DOUBTED = {"permuted sums", "longer sums", "another library"}
RARE = {"buffers before their copy", "a wrong kernel", "unlike shapes"}
"""Kinds that tests of the arithmetic may miss."""

ALWAYS_DOUBTED = KINDS.keys() - NEVER_DOUBTED - RARE
