"""Optimizers that train, are saved as engines save them, and continue with a grown model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR

import growkit
from growkit.engine.strict import strict_float64
from growkit.training import param_groups
from tests.conftest import load_strict, save_model

RATE, DECAY, EPS = 1e-2, 0.1, 1e-6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def batch(number: int, vocabulary: int = 29) -> Tensor:
    """Tokens of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(vocabulary, (2, 12), generator=generator)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step in strict float64; gives the loss before it."""
    with strict_float64():
        logits = model(batch(number)).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch(number)[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def trained(folder: Path, steps: int, **options: Any) -> tuple[Any, torch.optim.AdamW]:
    """The model of a folder after some steps, saved there again, and its optimizer."""
    model = load_strict(folder)
    options = {"lr": RATE, "weight_decay": DECAY, "eps": EPS} | options
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for number in range(steps):
        step(model, optimizer, number)
    model.save_pretrained(folder)
    return model, optimizer


def grown(
    folder: Path, state: Path | None, output: Path, way: Mapping[str, Any] | None = None
) -> growkit.GrowResult:
    """Grow as plain copies, with the state of the optimizer."""
    way = {"hidden": "x2", "symmetry": "keep"} | dict(way or {})
    return growkit.grow(folder, output, optimizer=state, verify=False, overwrite=True, **way)


# As engines save and load.


def save_torch(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """``torch.save``, as Trainer does it."""
    torch.save(optimizer.state_dict(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def load_torch(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As Trainer does it."""
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


@contextmanager
def one_process() -> Iterator[None]:
    """Without the warning that torch.distributed runs in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_distributed(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """As transformers' ``save_optimizer_distributed`` does it."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with one_process():
        dcp.save({"optimizer": state}, checkpoint_id=path, no_dist=True)
    return path


def load_distributed(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As transformers' ``load_optimizer_distributed`` does it."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with one_process():
        dcp.load({"optimizer": state}, checkpoint_id=folder / "optimizer", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)


Save = Callable[[Any, torch.optim.Optimizer, Path], Path]
Load = Callable[[Any, torch.optim.Optimizer, Path], None]
FORMATS: dict[str, tuple[Save, Load]] = {
    "torch": (save_torch, load_torch),
    "distributed": (save_distributed, load_distributed),
}


# The law of updates, by hand, for copies of the whole hidden space (docs of the table: training).


def spread(name: str, times: int, tied: bool) -> tuple[int, int]:
    """Copies in all of what a tensor reads and writes, where everything is copied so often."""
    if "embed_tokens" in name:
        return 1, times
    if "lm_head" in name:
        return times, 1
    if name == "model.norm.weight" and tied:
        return times, 1
    if "norm" in name or name.endswith("bias"):
        return 1, times
    return times, times


def by_the_law(model: Any, times: int, tied: bool, wrong: str = "") -> list[dict[str, Any]]:
    """A group for every parameter; one of its options may be as it was for the source."""
    groups = []
    for name, parameter in model.named_parameters():
        n_in, n_out = spread(name, times, tied)
        group = {"params": [parameter], "lr": RATE / n_in, "eps": EPS / n_out}
        group["weight_decay"] = DECAY * n_in
        plain = {"lr": RATE, "eps": EPS, "weight_decay": DECAY}
        groups.append(group | ({wrong: plain[wrong]} if wrong else {}))
    return groups


def moments_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What an optimizer keeps, by the name of the parameter."""
    return {name: optimizer.state[each] for name, each in model.named_parameters()}


def largest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of all tensors the largest difference, against the largest number in each."""
    assert one.keys() == other.keys()
    apart = ((one[n] - other[n]).abs().max() / other[n].abs().max().clamp(min=1e-300) for n in one)
    return float(max(apart))


def goes_on(
    place: Path,
    kind: str,
    config: Mapping[str, Any],
    way: Mapping[str, Any],
    engine: str,
    times: int = 2,
    steps: int = 3,
    wrong: str = "",
    spoil: Callable[[Path], None] | None = None,
) -> float:
    """How far a grown model is, after steps of its own, from the source grown after the same steps.

    Args:
        place: for everything that is written.
        kind: of the model.
        config: of the model.
        way: how it grows.
        engine: one of ``FORMATS``.
        times: how often everything is copied.
        steps: after growing.
        wrong: an option of the law to leave out.
        spoil: changes the grown folder.
    """
    source = save_model(place / "source", kind, dtype=torch.float64, **config)
    model, optimizer = trained(source, 3)
    save, load = FORMATS[engine]
    state = save(model, optimizer, place / "state")
    grown(source, state, place / "grown", way)
    if spoil:
        spoil(place / "grown")
    large = load_strict(place / "grown")
    tied = bool(config.get("tie_word_embeddings"))
    settings = {"lr": RATE, "weight_decay": DECAY, "eps": EPS}
    groups = param_groups(large, place / "grown", **settings, decays=lambda *_: True)
    new = torch.optim.AdamW(groups)
    load(large, new, place / "grown")
    other = torch.optim.AdamW(by_the_law(large, times, tied, wrong))
    other.state = new.state
    for number in range(3, 3 + steps):
        step(model, optimizer, number)
        step(large, other, number)
    model.save_pretrained(source)
    grown(source, None, place / "expected", way)
    expected = load_strict(place / "expected")
    return largest(large.state_dict(), expected.state_dict())


# The real Trainer.


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": batch(number)[0], "labels": batch(number)[0]}


class Recording(Trainer):
    """It remembers its losses as they are."""

    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        found = super().compute_loss(*arguments, **more)
        self.losses = [*getattr(self, "losses", []), float(found.detach())]
        return found


def trainer(folder: Path, output: Path, law: bool = False) -> Recording:
    """In true float64, with a schedule that rises and falls."""
    arguments = TrainingArguments(
        str(output),
        max_steps=6,
        per_device_train_batch_size=2,
        save_steps=3,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=DECAY,
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    groups = param_groups(model, folder, lr=RATE, weight_decay=DECAY) if law else None
    made = (torch.optim.AdamW(groups, lr=RATE), None) if groups else (None, None)
    return Recording(model, arguments, train_dataset=Batches(), optimizers=made)


# Schedules of the rate.

FLOOR = 2e-3

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda of: lr_scheduler.LambdaLR(of, lambda number: 0.9**number),
    "MultiplicativeLR": lambda of: lr_scheduler.MultiplicativeLR(of, lambda number: 0.9),
    "StepLR": lambda of: lr_scheduler.StepLR(of, 3),
    "MultiStepLR": lambda of: lr_scheduler.MultiStepLR(of, [2, 7]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lambda of: lr_scheduler.LinearLR(of, total_iters=9),
    "ExponentialLR": lambda of: lr_scheduler.ExponentialLR(of, 0.9),
    "PolynomialLR": lambda of: lr_scheduler.PolynomialLR(of, 12, 2.0),
    "CosineAnnealingLR": lambda of: lr_scheduler.CosineAnnealingLR(of, 9),
    "CosineAnnealingWarmRestarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3, 2),
    "OneCycleLR": lambda of: lr_scheduler.OneCycleLR(of, 2 * RATE, total_steps=25),
    "CyclicLR": lambda of: lr_scheduler.CyclicLR(of, FLOOR, RATE, 3),
    "ReduceLROnPlateau": lambda of: lr_scheduler.ReduceLROnPlateau(
        of, factor=0.5, patience=0, threshold=1.0, min_lr=FLOOR
    ),
    "SequentialLR": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of), lr_scheduler.CosineAnnealingLR(of, 9)], [3]
    ),
    "ChainedScheduler": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(of), lr_scheduler.ExponentialLR(of, 0.9)]
    ),
    "SWALR": lambda of: SWALR(of, FLOOR),
}
"""Of torch: all that it has, with rates of groups that can be scaled."""

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": FLOOR},
    "reduce_lr_on_plateau": {"patience": 0, "min_lr": FLOOR, "threshold": 1.0, "factor": 0.5},
    "cosine_with_min_lr": {"min_lr": FLOOR},
    "cosine_warmup_with_min_lr": {"min_lr": FLOOR, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 8, "min_lr_ratio": 0.2},
    "greedy": {"patience": 0, "min_lr": FLOOR, "max_lr": 1.5 * RATE, "factor": 0.8, "smooth": True},
}
"""What its schedules are given beside their length."""

FLOORS: dict[str, Callable[[Any], Any]] = {
    "floor": lambda of: lr_scheduler.CosineAnnealingLR(of, 9, FLOOR),
    "restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3, 2, FLOOR),
    "sequential": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of), lr_scheduler.CosineAnnealingLR(of, 9, FLOOR)], [3]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(of), lr_scheduler.CosineAnnealingLR(of, 9, FLOOR)]
    ),
    "plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, eps=1e-4),
}
"""With one rate for all groups, which cannot be scaled for each."""


def schedule_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of torch, or of transformers, by its name."""
    if name in SCHEDULES or name in FLOORS:
        return {**SCHEDULES, **FLOORS}[name](optimizer)
    return get_scheduler(name, optimizer, 2, 20, OF_TRANSFORMERS.get(name))


def advance(schedule: Any, loss: float) -> None:
    """A step of any scheduler."""
    adaptive = isinstance(schedule, lr_scheduler.ReduceLROnPlateau | GreedyLR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps before the optimizer's, and epochs
        schedule.step(loss) if adaptive else schedule.step()


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"num_key_value_heads": 4, "head_dim": 4, "sliding_window": None}),
]
