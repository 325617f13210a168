"""Everything that meets in a proof is on one device, wherever that is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[1]


def test_what_meets_in_a_proof_is_on_one_device(tmp_path: Path) -> None:
    """One test: workers that share the suite out would each run all of it."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot pretend a device")
    command = [sys.executable, "-m", "tests.pretend_gpu", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Any = json.loads(done.stdout)
    assert "same device" in found.pop("mixed")  # the control
    assert len(found) == 7
    for name, each in found.items():
        assert each["kept"] == name.endswith("sound"), name
    for name in ("llama", "grouped"):
        fault = found[f"{name}, spoiled"]["fault"]
        assert fault["tensor"] == "model.layers.1.self_attn.o_proj.weight"
        assert fault["factor"] == pytest.approx(1.01, rel=1e-6)
