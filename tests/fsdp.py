"""Trainer with FSDP2 on two CPU processes, from a grown folder."""

import json
import os
import shutil
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
from tests.conftest import TOKENS

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


def on_ranks(work: Callable[..., Any], *given: Any, scratch: Path, count: int = 2) -> list[Any]:
    """What several processes return from ``work(*given)``; InputErrors as their sentences."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Forked, they need not import anything.
    asked = count, work, given, scratch
    multiprocessing.start_processes(_one, asked, nprocs=count, start_method="fork")
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(count)]


def _one(
    rank: int, count: int, work: Callable[..., Any], given: tuple[Any, ...], scratch: Path
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate chooses a number, and warns of it
    distributed.init_process_group(
        "gloo", init_method=f"file://{scratch / 'meeting'}", rank=rank, world_size=count
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
