"""Trainer with FSDP2 on two CPU processes, from a grown folder.

    python -m tests.fsdp

launches ``examples/continue_training.py`` as people do, plain and with ``accelerate launch``, on a
Llama and on the demo's DIFF model: at once, and interrupted and taken up again. The suite takes the
processes from ``torch.multiprocessing``, which have everything imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import distributed, multiprocessing
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import growkit
from examples.continue_training import GrownTrainer
from growkit.cli.demo import MODEL, training_text
from tests.conftest import TOKENS, save_model

ROOT = Path(__file__).parents[1]
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "examples/fsdp2.yaml"]
RATE = 1e-2
FSDP = {"state_dict_type": "SHARDED_STATE_DICT"}


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(29, (count, TOKENS), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def trained(
    folder: Path, output: Path, steps: int, batch: int, resume: bool = False, **options: Any
) -> list[float]:
    """The losses of all steps, also of those before a run was taken up again."""
    arguments = TrainingArguments(
        str(output),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=batch,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = GrownTrainer(str(folder), model, arguments, train_dataset=rows())
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-2") if resume else None)
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


def on_two(work: Callable[..., Any], *given: Any, scratch: Path) -> list[Any]:
    """What two processes return from ``work(*given)``; InputErrors as their sentences."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Forked, they need not import anything.
    multiprocessing.start_processes(_one, (work, given, scratch), nprocs=2, start_method="fork")
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(2)]


def _one(rank: int, work: Callable[..., Any], given: tuple[Any, ...], scratch: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate chooses a number, and warns of it
    distributed.init_process_group(
        "gloo", init_method=f"file://{scratch / 'meeting'}", rank=rank, world_size=2
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    try:
        found = work(*given)
    except growkit.InputError as error:
        found = str(error)
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "text").write_text(training_text()[:40_000], encoding="utf-8")
        source = save_model(scratch / "llama", "llama", vocab_size=256, max_position_embeddings=256)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / file, source)
        growkit.grow(source, scratch / "wide", hidden="x2")
        growkit.grow(MODEL, scratch / "diff", method="group-diff", hidden="x2", signal_heads="x4")
        for kind in ("wide", "diff"):
            folder, text = scratch / kind, scratch / "text"
            one = launched([], folder, text, scratch / f"{kind}-one", steps=6, batch=4)
            two = launched(LAUNCH, folder, text, scratch / f"{kind}-two", steps=6, batch=2)
            again = scratch / f"{kind}-again"
            kept = shutil.ignore_patterns("checkpoint-6")  # as if it had been interrupted
            shutil.copytree(scratch / f"{kind}-two", again, ignore=kept)
            resumed = launched(LAUNCH, folder, text, again, steps=6, batch=2)
            sys.stdout.write(f"{kind}: one process {one}\ntwo {two}\ntaken up again {resumed}\n")
            assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-3
            assert two == resumed


def launched(
    how: list[str], folder: Path, text: Path, output: Path, steps: int, batch: int
) -> list[float]:
    """The losses of all steps of the example, run as a command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    more = ["--cpu", "--steps", steps, "--save-steps", 3, "--batch", batch, "--lr", 1e-3]
    given = map(str, (folder, text, output, *more))
    command = [sys.executable, *how, "examples/continue_training.py", *given]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    states = output.glob("checkpoint-*/trainer_state.json")
    last = max(states, key=lambda file: int(file.parent.name.split("-")[1]))
    history = json.loads(last.read_text())["log_history"]
    return [each["loss"] for each in history if "loss" in each]


if __name__ == "__main__":
    main()
