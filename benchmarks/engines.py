"""Whether what growkit writes trains at once with Trainer, LoRA and FSDP.

    python benchmarks/engines.py SRC

``SRC`` is the folder of a Llama, which is made twice as wide. The demo model is grown beside it, by
group-diff to 4:1. Each goes on for 20 steps on one batch of the demo's training text, on a CPU, and
its loss must fall. Needs accelerate and peft.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import growkit
from growkit.cli.demo.story import MODEL
from growkit.cli.demo.text import training_text

STEPS, BATCH, LENGTH, RATE = 20, 4, 64, 1e-3


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)


def rows(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    data = torch.tensor(list(training_text().encode())) % vocabulary
    windows = data[: BATCH * LENGTH].view(-1, LENGTH)
    return STEPS * [{"input_ids": window, "labels": window} for window in windows]


def trainer(model: Any) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        one = Trainer(model=model, args=arguments, train_dataset=rows(model.config.vocab_size))
        one.remove_callback(PrinterCallback)
        one.train()
    return [float(entry["loss"]) for entry in one.state.log_history if "loss" in entry]


def lora(folder: Path, adapter: Path) -> list[float]:
    """With an adapter that is saved and put on a new copy of the model."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load(folder), config)
    losses = trainer(model)
    model.save_pretrained(adapter)
    again = PeftModel.from_pretrained(load(folder), adapter)
    ids = rows(model.config.vocab_size)[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)
    return losses


def fsdp(rank: int, folder: Path, meeting: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    model = load(folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = torch.stack([row["input_ids"] for row in rows(model.config.vocab_size)])
    losses = []
    for batch in data.split(BATCH):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if rank == 0:
        report("FSDP2, 2 processes", losses)
    torch.distributed.destroy_process_group()


def report(how: str, losses: list[float]) -> None:
    assert losses[-1] < losses[0]
    print(f"| {how} | {losses[0]:.3f} | {losses[-1]:.3f} |", flush=True)


def main() -> None:
    source = Path(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = ("torch", "transformers", "accelerate", "peft")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    with tempfile.TemporaryDirectory() as scratch:
        wide, many = Path(scratch) / "wide", Path(scratch) / "many"
        growkit.grow(source, wide, hidden="x2", verify=False)
        growkit.grow(MODEL, many, method="group-diff", hidden="x2", signal_heads="x4", verify=False)
        for folder in (wide, many):
            print(f"\n{type(load(folder)).__name__}\n")
            print("| trained with | loss at the first step | at the last |")
            print("| --- | --- | --- |", flush=True)
            report("Trainer", trainer(load(folder)))
            report("Trainer, LoRA", lora(folder, Path(scratch) / f"{folder.name}-adapter"))
            meeting = Path(scratch) / f"{folder.name}-meeting"
            torch.multiprocessing.spawn(fsdp, (folder, meeting), nprocs=2)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
