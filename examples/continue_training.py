"""Continue the training of a grown model with Trainer: in one process, or sharded by FSDP2.

    python examples/continue_training.py my-larger-llama some-text.txt my-run
    accelerate launch --config_file examples/fsdp2.yaml \
        examples/continue_training.py my-larger-llama some-text.txt my-sharded-run

Give the rate and decay of the source; the parameter groups derive those of every tensor. Before the
first step, the model in memory is compared with the fingerprint in its folder. Weights are float32,
because bfloat16 loses small updates; ``--bf16`` computes in bfloat16. ``--lora q_proj v_proj``
trains only adapters; in Shared DIFF use ``base`` and ``down`` for ``q_proj`` and ``k_proj``. An
interrupted run continues from its last checkpoint. If the folder was grown with a checkpoint's
optimizer, training continues from its step, which ``--steps`` includes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import growkit
from growkit.training import AssertPreserved, param_groups

LENGTH = 128


class GrownTrainer(Trainer):
    """A Trainer with the groups of the grown model. Under FSDP, Trainer takes no ``optimizers``."""

    def __init__(self, folder: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[AssertPreserved(folder)], **kwargs)
        self.folder = folder

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            args = self.args
            groups = param_groups(
                model or self.model,
                self.folder,
                lr=args.learning_rate,
                weight_decay=args.weight_decay,
                eps=args.adam_epsilon,
            )
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas)
        return self.optimizer

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Load the weights of a checkpoint; the model has those of the grown folder."""
        if checkpoint != self.folder:
            super()._load_from_checkpoint(checkpoint, model)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder that growkit wrote")
    parser.add_argument("text", help="a text file")
    parser.add_argument("output", help="folder for checkpoints and the trained model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="windows of text, per process")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the source")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the source")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--lora", nargs="+", help="modules whose adapters are trained")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    given = parser.parse_args(arguments)

    growkit.register_own_classes()  # the DIFF Transformer: no code from the folder runs
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=given.lora))
    ids = tokenizer(Path(given.text).read_text("utf-8")).input_ids
    windows = [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
    trainer = GrownTrainer(
        given.folder,
        model,
        TrainingArguments(
            given.output,
            max_steps=given.steps,
            save_steps=given.save_steps,
            per_device_train_batch_size=given.batch,
            learning_rate=given.lr,
            weight_decay=given.weight_decay,
            max_grad_norm=0,  # the global norm weighs tensors differently than in the source
            bf16=given.bf16,
            use_cpu=given.cpu,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        parser.error("accelerate shards only on accelerators; on a CPU start one process")
    last = get_last_checkpoint(given.output) if Path(given.output).is_dir() else None
    if last is None and not given.lora and Path(given.folder, "trainer_state.json").is_file():
        last = given.folder
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_fsdp_enabled:  # its checkpoints hold shards
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(Path(given.output, "trained")))
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(Path(given.output, "trained"))
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


if __name__ == "__main__":
    main()
