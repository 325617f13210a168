"""What growing and converting are worth.

    python -m benchmarks.continual run growth [--scale small] [--device cuda] [--text PATH]
    python -m benchmarks.continual report

``run`` carries an experiment out (``experiments/*.yaml``). It may be killed at any moment: the same
command continues with the run that was killed. Finished runs are lines of
``benchmarks/results/continual/EXPERIMENT.jsonl``; trained sources are in ``--work``, which may be
deleted once an experiment is done.

``report`` makes ``docs/explanation/results.md``, its charts and ``tables.md`` from these lines
alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.settings import DEVICES

ROOT = Path(__file__).parents[2]
LINES = ROOT / "benchmarks" / "results" / "continual"


def run(chosen: argparse.Namespace) -> None:
    """Carry an experiment out."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from transformers.utils import logging

    from benchmarks.continual.campaign import Campaign
    from benchmarks.continual.experiment import load
    from benchmarks.continual.text import read_text
    from growkit.engine.device import choose_device

    logging.disable_progress_bar()
    device = choose_device(chosen.device).type
    if device == "cpu":
        torch.set_num_threads(chosen.threads)  # another number may change last bits

    def report(what: str) -> None:
        print(time.strftime("%H:%M:%S"), what, flush=True)

    experiment = load(chosen.experiment, chosen.scale)
    scale = experiment.scale
    report("reading the text")
    of_text = scale.text_bytes, scale.packages, scale.endings
    text = read_text(chosen.text, scale.vocabulary, chosen.work, *of_text)
    report(str(text.about))
    file = chosen.results / f"{experiment.name}.jsonl"
    Campaign(experiment, text, chosen.work, file, device, report).carry_out()
    report(f"all runs are in {file}")


def report(chosen: argparse.Namespace) -> None:
    """Make the page and its charts."""
    from benchmarks.continual.report import write

    write(chosen.results, chosen.page, chosen.tables)
    print(f"wrote {chosen.page}, its charts and {chosen.tables}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="carry an experiment out, or continue it")
    one.add_argument("experiment", help="a file in experiments/, without .yaml")
    one.add_argument("--scale", default="small", help="of scales.yaml")
    one.add_argument("--device", choices=DEVICES[1:], default="cpu")
    one.add_argument("--threads", type=int, default=1, help="on a CPU, of one process")
    one.add_argument("--text", type=Path, help="a file, a folder, or text-… of another work folder")
    one.add_argument("--work", type=Path, default=ROOT / "build" / "continual")
    other = commands.add_parser("report", help="make tables and charts of all results")
    other.add_argument("--page", type=Path, default=ROOT / "docs" / "explanation" / "results.md")
    other.add_argument("--tables", type=Path, default=LINES / "tables.md")
    for command, call in ((one, run), (other, report)):
        command.add_argument("--results", type=Path, default=LINES)
        command.set_defaults(call=call)
    chosen = parser.parse_args()
    try:
        chosen.call(chosen)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
