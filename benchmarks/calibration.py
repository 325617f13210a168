"""Plain against data-aware low ranks: KL on held-out text at equal rank, for the demo model.

    python benchmarks/calibration.py

prints the table of ``benchmarks/results/2026-11-21-calibration-cpu.md``. The calibration text is
the training text of the demo model; all held-out text is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import head, row

import growkit
from growkit.cli.demo import MODEL, held_out_text, training_text

WINDOWS = 1000
"""More than the held-out text has."""

RANKS = {"head": (1, 2, 4, 6), "layer": (2, 4, 8, 12), "all_heads": (2, 4, 8)}


def main() -> None:
    """Convert, prove, print."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        calibration, held_out = folder / "calibration.txt", folder / "held_out.txt"
        calibration.write_text(training_text(), encoding="utf-8")
        held_out.write_text(held_out_text(), encoding="utf-8")
        print(head("scope", "rank", "shrinkage", "plain, nats", "data-aware, nats", "ratio"))
        for scope, ranks in RANKS.items():
            for rank in ranks:
                kl = []
                for text in (None, str(calibration)):
                    result = growkit.convert(
                        MODEL,
                        folder / "out",
                        to="shared-diff",
                        scope=scope,
                        rank=rank,
                        calibration=text,
                        dtype="float32",
                        verify=growkit.Settings(text=str(held_out), prompts=WINDOWS),
                        overwrite=True,
                    )
                    assert result["verification"] is not None
                    found = result["verification"].sections.logits.strict_float64.kl_nats_per_token
                    assert found is not None
                    kl.append(found)
                manifest = json.loads((folder / "out" / "growkit.json").read_text("utf-8"))
                (step,) = manifest["recipe"]["steps"]
                figures = f"{kl[0]:.3g}", f"{kl[1]:.3g}", f"{kl[1] / kl[0]:.2f}"
                print(row(scope, rank, f"{float(step['shrinkage']):g}", *figures), flush=True)


if __name__ == "__main__":
    main()
