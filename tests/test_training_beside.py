"""What lies beside an optimizer's state: engines take it up, or it is said that it is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.optimizer.groups import ParamGroup
from growkit.optimizer.schedule import grown_schedule
from tests.conftest import folder_bytes, save_model
from tests.optimizer_state import (
    FLAT,
    FLOORS,
    RATE,
    SCHEDULES,
    advance,
    grown,
    one_process,
    schedule_of,
    trained,
    trainer,
)

LLAMA = {"num_hidden_layers": 1}
DECAY = 0.1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of Trainer halfway, and the losses of the whole."""
    place = tmp_path_factory.mktemp("ran")
    source = save_model(place / "source", "llama", dtype=torch.float64, **LLAMA)
    first = trainer(source, place / "run")
    with strict_float64():
        first.train()
    return place / "run" / "checkpoint-3", first.losses


def test_trainer_goes_on_to_rounding(ran: tuple[Path, list[float]], tmp_path: Path) -> None:
    """From the grown folder as a checkpoint, whose schedule has the law's factors."""
    checkpoint, losses = ran
    out = tmp_path / "out"
    found = grown(checkpoint, checkpoint, out).optimizer
    assert found
    assert found.beside["rng_state.pth"] == "carried over"
    assert found.beside["training_args.bin"].startswith("left: ")
    assert (out / "rng_state.pth").read_bytes() == (checkpoint / "rng_state.pth").read_bytes()
    resumed = trainer(out, tmp_path / "on", law=True)
    with strict_float64():
        resumed.train(resume_from_checkpoint=str(out))
    assert resumed.losses == pytest.approx(losses[3:], abs=1e-12)
    schedule = torch.load(out / "scheduler.pt", weights_only=True)
    schedule["base_lrs"] = [RATE] * len(schedule["base_lrs"])
    torch.save(schedule, out / "scheduler.pt")
    other = trainer(out, tmp_path / "other", law=True)
    with strict_float64():
        other.train(resume_from_checkpoint=str(out))
    assert other.losses != pytest.approx(losses[3:], abs=1e-6)


def test_the_best_checkpoint_is_none_of_the_grown_model(
    ran: tuple[Path, list[float]], tmp_path: Path
) -> None:
    checkpoint, _ = ran
    state = checkpoint / "trainer_state.json"
    whole = json.loads(state.read_text())
    best = {"best_model_checkpoint": str(checkpoint), "best_metric": 1.0, "best_global_step": 3}
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}
    torch.save(scaler, checkpoint / "scaler.pt")
    state.write_text(json.dumps(whole | best))
    out = tmp_path / "out"
    grown(checkpoint, checkpoint, out)
    assert json.loads((out / "trainer_state.json").read_text()) == whole | dict.fromkeys(best)
    assert torch.load(out / "scaler.pt", weights_only=True) == scaler
    recorded = json.loads((out / "growkit.json").read_text())["files"]
    assert {"rng_state.pth", "scaler.pt", "trainer_state.json", "scheduler.pt"} <= recorded.keys()
    state.write_text(json.dumps(whole))
    (checkpoint / "scaler.pt").unlink()


class Malicious:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_code_beside_the_state(ran: tuple[Path, list[float]], tmp_path: Path) -> None:
    checkpoint, _ = ran
    kept = (checkpoint / "rng_state.pth").read_bytes()
    torch.save({"python": Malicious()}, checkpoint / "rng_state.pth")
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError, match=r"rng_state\.pth cannot be loaded"):
        grown(checkpoint, checkpoint, tmp_path / "out")
    assert folder_bytes(tmp_path) == before
    (checkpoint / "rng_state.pth").write_bytes(kept)


def test_entries_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """What torchtitan saves beside: its counters, its data and a schedule."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model, optimizer = trained(source, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    content = {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "lr_scheduler": schedule.state_dict(),
        "train_state": {"step": torch.tensor(1), "ntokens_seen": torch.tensor(24)},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
    }
    with one_process():
        dcp.save(content, checkpoint_id=tmp_path / "state", no_dist=True)
    out = tmp_path / "out"
    found = grown(source, tmp_path / "state", out).optimizer
    assert found
    assert found.beside["weights"].startswith("left: ")
    assert found.beside["dataloader"] == "carried over"
    wanted = {
        "train_state": {"step": torch.tensor(0), "ntokens_seen": torch.tensor(0)},
        "dataloader": {"dp_rank_0": b"", "world_size": 0},
        "lr_scheduler": {"base_lrs": [], "last_epoch": 5},
    }
    with one_process():
        dcp.load(wanted, checkpoint_id=out / "optimizer", no_dist=True)
    assert wanted["train_state"] == content["train_state"]
    assert wanted["dataloader"] == content["dataloader"]
    rates = wanted["lr_scheduler"]["base_lrs"]
    assert rates == [RATE * each for each in (1, 0.5, 1, 1)][: len(rates)] or len(set(rates)) == 2
    assert wanted["lr_scheduler"]["last_epoch"] == 0


def test_a_floor_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    _, optimizer = trained(source, 1)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    torch.save(schedule_of("sequential", optimizer).state_dict(), source / "scheduler.pt")
    with pytest.raises(InputError, match=r"scheduler\.pt has a schedule with eta_min = 0\.002"):
        grown(source, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def optimizer_of(rates: list[float]) -> torch.optim.AdamW:
    """With a group for every rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": each} for each in rates]
    return torch.optim.AdamW(groups, lr=RATE)


def rates_of(name: str, given: list[float], scale: list[float]) -> tuple[Any, Any]:
    """Those of 15 steps after 4, of the groups of a source and of those made of them."""
    source, grown_one = optimizer_of(given), optimizer_of([1.0] * len(scale))
    schedule = schedule_of(name, source)
    for number in range(4):
        advance(schedule, -number)
    after = schedule_of(name, grown_one)
    origins = [place * len(given) // len(scale) for place in range(len(scale))]
    groups = [
        ParamGroup((), source.param_groups[of], each, of)
        for of, each in zip(origins, scale, strict=True)
    ]
    for new, group in zip(grown_one.param_groups, groups, strict=True):
        old = group.options
        of_rates = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr"} & old.keys()
        new.update({key: old[key] for key in old.keys() - {"params"}})
        new.update({key: old[key] * group.rate for key in of_rates})
    after.load_state_dict(grown_schedule(schedule.state_dict(), "here", len(given), groups))
    expected, found = [], []
    for number in range(15):
        advance(schedule, 10.0 - number % 7)
        advance(after, 10.0 - number % 7)
        of_source = [group["lr"] for group in source.param_groups]
        expected += [of_source[of] * each for of, each in zip(origins, scale, strict=True)]
        found += [group["lr"] for group in grown_one.param_groups]
    return found, expected


def test_every_schedule_goes_on_at_its_rates() -> None:
    """All of torch and of transformers; what falls to one rate for all groups is refused."""
    classes = {n for n, each in vars(lr_scheduler).items() if isinstance(each, type) and "LR" in n}
    known = {*SCHEDULES, "LRScheduler", "_LRScheduler"}
    assert classes <= known
    for name in (*SCHEDULES, *(kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION)):
        found, expected = rates_of(name, [RATE, RATE / 2], [1.0, 0.5, 0.25, 0.5])
        assert found == pytest.approx(expected, rel=1e-12), name
        assert len(set(found)) > 1
    for name in FLOORS:
        said = r"here has a schedule with (eta_min|eps) = .* one rate for all groups"
        with pytest.raises(InputError, match=said):
            rates_of(name, [RATE], [1.0, 0.5])
        for scale in ([1.0, 1.0], [0.5, 0.5]):  # which are alike
            found, expected = rates_of(name, [RATE], scale)
            assert found == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"warmup_start_lr": 1e-4}, "warmup_start_lr = 0.0001, which no scheduler of torch"),
        ({"base_lrs": [RATE, 1.0]}, "a list for the 1 groups of the optimizer was expected"),
        ({"base_lrs": RATE}, "a list for the 1 groups"),
        ({"_last_lr": ["a"]}, "a list for the 1 groups"),
    ],
)
def test_other_schedules(changed: dict[str, Any], said: str) -> None:
    """What nobody knows to be a rate or a factor, and what is of another optimizer."""
    state = schedule_of("LinearLR", optimizer_of([RATE])).state_dict()
    groups = [ParamGroup((), {}, 1.0), ParamGroup((), {}, 0.5)]
    assert grown_schedule(state | {"warmup_steps": 3, "base_lrs": [RATE] * 3}, "here", 1, groups)
    with pytest.raises(InputError, match=said):
        grown_schedule({"deep": [state | changed]}, "here", 1, groups)
