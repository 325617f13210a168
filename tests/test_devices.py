"""Everything that meets in a proof is on one device, wherever that is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot pretend a device")
    folder = tmp_path_factory.mktemp("pretended")
    command = [sys.executable, "-m", "tests.pretend_gpu", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_control_notices_what_is_not_moved(found: Any) -> None:
    assert "same device" in found.pop("mixed")


def test_proofs_run_and_are_right(found: Any) -> None:
    pairs = {name: each for name, each in found.items() if name != "mixed"}
    assert len(pairs) == 16
    for name, each in pairs.items():
        assert each["kept"] == name.endswith("sound"), name


def test_faults_are_found_there_as_well(found: Any) -> None:
    for name in ("llama", "tied", "window", "grouped"):
        fault = found[f"{name}, spoiled"]["fault"]
        assert fault["tensor"] == "model.layers.1.self_attn.o_proj.weight"
        assert fault["factor"] == pytest.approx(1.01, rel=1e-6)
