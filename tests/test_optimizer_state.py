"""The state of an optimizer, grown with the weights, and taken up by the engines themselves."""

import json
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.extras.optimizer.param_groups import ParamGroup
from growkit.extras.optimizer.schedule import grown_schedule, read_schedule
from growkit.training import hidden_matrices, param_groups
from tests.commands import cli
from tests.files import edit_weights, flip_bit, folder_bytes
from tests.models import load_strict, save_model, train_step

RATE, DECAY, EPS = 1e-2, 0.1, 1e-6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def batch(number: int, vocabulary: int = 29) -> Tensor:
    """Tokens of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(vocabulary, (2, 12), generator=generator)


def step(model: Any, optimizer: Any, number: int) -> float:
    """One step in strict float64; gives the loss before it."""
    return train_step(model, optimizer, batch(number))


def muon(model: Any, **settings: Any) -> torch.optim.Muon:
    """An optimizer of the matrices inside, after a step."""
    inside = [each for name, each in model.named_parameters() if name in hidden_matrices(model)]
    optimizer = torch.optim.Muon(inside, **settings)
    model(batch(0), labels=batch(0)).loss.backward()
    optimizer.step()
    model.zero_grad()
    return optimizer


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
    way = {"hidden": "x2", "symmetry": "keep", "verify": False} | dict(way or {})
    return growkit.grow(folder, output, optimizer=state, overwrite=True, **way)


# As engines save and load.


def save_torch(model: Any, optimizer: Any, path: Path) -> Path:
    """``torch.save``, as Trainer does it."""
    torch.save(optimizer.state_dict(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def load_torch(model: Any, optimizer: Any, folder: Path) -> None:
    """As Trainer does it."""
    assert zipfile.ZipFile(folder / "optimizer.pt").testzip() is None
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


@contextmanager
def one_process() -> Iterator[None]:
    """Without the warning that torch.distributed runs in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_distributed(model: Any, optimizer: Any, path: Path) -> Path:
    """As transformers' ``save_optimizer_distributed`` does it."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with one_process():
        dcp.save({"optimizer": state}, checkpoint_id=path, no_dist=True)
    return path


def load_distributed(model: Any, optimizer: Any, folder: Path) -> None:
    """As transformers' ``load_optimizer_distributed`` does it."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with one_process():
        dcp.load({"optimizer": state}, checkpoint_id=folder / "optimizer", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)


def save_numbered(model: Any, optimizer: Any, path: Path) -> Path:
    """As accelerate's ``save_fsdp_optimizer`` does it: groups have numbers."""
    state = get_optimizer_state_dict(model, optimizer)
    with one_process():
        dcp.save({"optimizer": state}, checkpoint_id=path / "optimizer_0", no_dist=True)
    return path


def load_numbered(model: Any, optimizer: Any, folder: Path) -> None:
    """As accelerate's ``load_fsdp_optimizer`` does it."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with one_process():
        dcp.load(state, checkpoint_id=folder / "optimizer_0", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


Save = Callable[[Any, Any, Path], Path]
Load = Callable[[Any, Any, Path], None]
FORMATS: dict[str, tuple[Save, Load]] = {
    "torch": (save_torch, load_torch),
    "distributed": (save_distributed, load_distributed),
    "numbered": (save_numbered, load_numbered),
}


# The law of updates, by hand, for copies of the whole hidden space (docs of the table: training).


def largest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of all tensors the largest difference, against the largest number in each."""
    assert one.keys() == other.keys()
    apart = ((one[n] - other[n]).abs().max() / other[n].abs().max().clamp(min=1e-300) for n in one)
    return float(max(apart))


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


LLAMA = {"num_key_value_heads": 4, "num_hidden_layers": 1}


def by_dimensions(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("custom", [None, by_dimensions], ids=["trainer", "dimensions"])
@pytest.mark.parametrize("to", ["dint", None], ids=["dint", "wider"])
def test_groups_are_those_of_the_training(tmp_path: Path, to: str | None, custom: Any) -> None:
    """Vectors that are no norms (λ, gates) lie where Trainer, or whoever trained, has them.

    Groups of two optimizers are matched by position, so a single one elsewhere is an error, or
    goes on with another's moments.
    """
    source = save_model(tmp_path / "source", "diffllama", num_hidden_layers=1)
    first = trainer(source, tmp_path / "run")
    if custom is None:
        optimizer = first.create_optimizer()
    else:
        every = list(first.model.named_parameters())
        parted = [[p for n, p in every if custom(n, p) is wanted] for wanted in (True, False)]
        optimizer = torch.optim.AdamW([{"params": each} for each in parted], lr=RATE)
    first.model(batch(0), labels=batch(0)).loss.backward()
    optimizer.step()
    state = save_torch(first.model, optimizer, tmp_path / "optimizer")
    out = tmp_path / "out"
    if to:
        growkit.convert(source, out, to, optimizer=state, verify=False)
    else:
        grown(source, state, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups(model, out, lr=RATE, decays=custom)
    kept = torch.load(out / "optimizer.pt", weights_only=True)["param_groups"]
    made = [[names[id(each)] for each in group["params"]] for group in groups]
    assert any("gamma_gate" in name for group in made for name in group) == (to == "dint")
    assert [group["param_names"] for group in kept] == made


def test_a_model_that_was_grown_twice_finds_its_groups_by_name(tmp_path: Path) -> None:
    """As the documents make them, with the rates of ``param_groups``."""
    source, once, out = tmp_path / "source", tmp_path / "once", tmp_path / "out"
    model, optimizer = trained(save_model(source, "llama", **LLAMA), 1)
    grown(source, save_torch(model, optimizer, tmp_path / "state"), once)
    growkit.grow(
        once, out, method="depth", layers="x2", optimizer=once / "optimizer.pt", verify=False
    )
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    state = torch.load(out / "optimizer.pt", weights_only=True)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in group["param_names"]]}
        for group in state["param_groups"]
    ]
    again = torch.optim.AdamW(groups)
    again.load_state_dict(state)
    rates = {id(each): group["lr"] for group in again.param_groups for each in group["params"]}
    assert rates[id(named["lm_head.weight"])] == pytest.approx(RATE / 2)
    by_law = param_groups(model, out, lr=RATE, decays=lambda *_: True)
    assert rates == {id(each): group["lr"] for group in by_law for each in group["params"]}


WIDER = growkit.GrowStep("hypercloning", hidden="x2")
DEEPER = growkit.GrowStep("depth", layers="x2")
AGAIN = {
    "wider": (WIDER, WIDER),
    "deeper": (WIDER, DEEPER),
    "experts": (WIDER, growkit.GrowStep("upcycle", experts=4), WIDER),
    "heads": (growkit.GrowStep("group-diff", signal_heads="x2"), WIDER),
}


def settings(folder: Path) -> dict[str, tuple[float, ...]]:
    """What ``param_groups`` gives every parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups(model, folder, lr=RATE, weight_decay=DECAY)
    return {
        names[id(each)]: (group["lr"], group["weight_decay"], group["eps"])
        for group in groups
        for each in group["params"]
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", AGAIN)
def test_growing_in_several_runs_gives_the_rates_of_one(way: str, tmp_path: Path) -> None:
    """Also if the model was trained in between, since it was trained with these rates."""
    heads = way == "heads"
    source = save_model(tmp_path / "0", "diff_transformer" if heads else "llama")
    steps = AGAIN[way]
    once = growkit.Recipe(str(source), steps, str(tmp_path / "once"), verify=None)
    assert not growkit.run(once)["warnings"]
    for number, step in enumerate(steps):
        folders = [str(tmp_path / f"{each}") for each in (number, number + 1)]
        result = growkit.run(growkit.Recipe(folders[0], (step,), folders[1], verify=None))
        assert bool(result["warnings"]) == (number > 0)
        with edit_weights(Path(folders[1])) as weights:
            weights["lm_head.weight"] *= 1.01
    expected = settings(tmp_path / "once")
    assert settings(Path(folders[1])) == {name: pytest.approx(e) for name, e in expected.items()}
    (Path(folders[0]) / "growkit.json").write_text('{"updates": {"groups": [{"lr": 0}]}}')
    anew = growkit.Recipe(folders[0], steps[-1:], str(tmp_path / "anew"), verify=None)
    assert "is not what growkit writes" in growkit.run(anew)["warnings"][0]
    assert settings(tmp_path / "anew") != settings(Path(folders[1]))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A model and the state of its optimizer."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0), labels=batch(0)).loss.backward()
    optimizer.step()
    return source, save_torch(model, optimizer, tmp_path / "optimizer")


def test_what_is_written_beside_the_weights(made: tuple[Path, Path], tmp_path: Path) -> None:
    """It is recorded, and verify looks at it: a file that was changed since is a finding."""
    source, state = made
    quick = {"verify": growkit.Settings(prompts=1, length=8), "hidden": "x2"}
    out = tmp_path / "out"
    result = growkit.grow(source, out, optimizer=state, **quick)
    manifest = json.loads((out / "growkit.json").read_text())
    assert "optimizer.pt" in manifest["files"]
    assert "optimizer.pt" in manifest["other_files"]
    assert manifest["optimizer"] == result["optimizer"] | {"path": state.name}
    assert manifest["recipe"]["optimizer"] == state.name
    verdict = growkit.verify(source, out, prompts=1, length=8)
    assert (verdict["kept"], verdict.sections.files.unknown_files) == (True, [])
    flip_bit(out / "optimizer.pt")
    verdict = growkit.verify(source, out, prompts=1, length=8)
    assert (verdict["kept"], verdict.sections.files.changed) == (False, ["optimizer.pt"])


def test_an_order_that_was_assumed_is_reported(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Numbers alone do not tell an order with equal shapes from another; names do."""
    source, state = made
    output = ["--no-verify", "--optimizer", str(state), "--hidden", "x2"]
    ran = cli("grow", source, tmp_path / "out", *output)
    said = "does not name its parameters; assumed order: all in one group"
    assert (ran.exit_code, said in " ".join(ran.output.split())) == (0, True)
    assert "Trainer's own optimizer, with 2 groups, cannot load these" in " ".join(
        ran.output.split()
    )
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert manifest["optimizer"]["assumed"] == "all in one group"
    again = grown(tmp_path / "out", tmp_path / "out", tmp_path / "again").optimizer
    assert again.assumed == ""


def test_the_state_is_read_and_never_replaced(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, state = made
    growkit.grow(source, tmp_path / "out", optimizer=state, verify=False, hidden="x2")
    inside = tmp_path / "out" / "optimizer.pt"
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError, match="overlap"):
        growkit.grow(
            source, tmp_path / "out", optimizer=inside, verify=False, hidden="x2", overwrite=True
        )
    assert folder_bytes(tmp_path) == before


def test_what_does_not_go_through_begins_anew(tmp_path: Path) -> None:
    """λ is solved again; a reset parameter is as the optimizer would make it in its first step."""
    source = save_model(tmp_path / "source", "diffllama", num_hidden_layers=1)
    model, optimizer = trained(source, 1)
    state = save_torch(model, optimizer, tmp_path / "optimizer")
    result = growkit.convert(source, tmp_path / "out", "microsoft", optimizer=None, verify=False)
    assert result["optimizer"] is None
    found = growkit.convert(source, tmp_path / "dint", "dint", optimizer=state, verify=False)
    reset = found.optimizer.reset
    assert reset
    assert all(why for why in reset.values())
    kept = torch.load(tmp_path / "dint" / "optimizer.pt", weights_only=True)
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "dint")
    for (name, _), each in zip(new.named_parameters(), kept["state"].values(), strict=True):
        assert (name in reset) == (float(each["step"]) == 0) == bool((each["exp_avg"] == 0).all())


class Both:
    """AdamW beside Muon, as ``docs/how-to/training.md`` makes them."""

    def __init__(self, model: Any, folder: Path | None, adjusted: str = "original") -> None:
        rates, matrices = {"lr": RATE, "weight_decay": DECAY}, hidden_matrices(model)
        rest = param_groups(model, folder, **rates, eps=EPS, only=lambda n, _: n not in matrices)
        muon = param_groups(model, folder, **rates, optimizer="muon", adjust_lr_fn=adjusted)
        self.all = [torch.optim.AdamW(rest), torch.optim.Muon(muon, adjust_lr_fn=adjusted)]

    def zero_grad(self) -> None:
        for each in self.all:
            each.zero_grad()

    def step(self) -> None:
        for each in self.all:
            each.step()

    def rates(self) -> list[float]:
        groups = [group for each in self.all for group in each.param_groups]
        return [group[key] for group in groups for key in ("lr", "weight_decay", "eps")]


OTHER_SHAPES = {"ffn": "x4"}
"""Muon's rate depends on the ratio of a matrix's rows and columns, which this changes."""


@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("engine", FORMATS)
@pytest.mark.sampled(2)
def test_adamw_beside_muon_goes_on(engine: str, adjusted: str, tmp_path: Path) -> None:
    """Each has a file of its own, or both have one folder; Muon itself rounds to bfloat16."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.float64, **LLAMA)
    save, load = FORMATS[engine]
    model = load_strict(source)
    both = Both(model, None, adjusted)
    step(model, both, 0)
    model.save_pretrained(source)
    for number, some in enumerate(both.all if engine == "torch" else [both.all]):
        state = save(model, some, tmp_path / f"state{number}")
        grown(source, state, tmp_path / f"out{number}", OTHER_SHAPES)
    large = load_strict(tmp_path / "out0")
    new = Both(large, tmp_path / "out0", adjusted)
    expected = new.rates()
    begun = {name: each.clone() for name, each in large.state_dict().items()}
    for number, some in enumerate(new.all if engine == "torch" else [new.all]):
        load(large, some, tmp_path / f"out{number}")
    assert new.rates() == pytest.approx(expected)
    step(model, both, 1)
    step(large, new, 1)
    model.save_pretrained(source)
    grown(source, None, tmp_path / "expected", OTHER_SHAPES)
    copies, matrices = load_strict(tmp_path / "expected").state_dict(), hidden_matrices(large)
    found = large.state_dict()
    rest = {name: found[name] for name in found.keys() - matrices}
    assert largest(rest, {name: copies[name] for name in rest}) < 1e-11
    for name in matrices:
        moved = (copies[name] - begun[name]).norm()
        assert (found[name] - copies[name]).norm() < 0.02 * moved, name
        assert moved > 0


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


def optimizer_of(rates: list[float]) -> torch.optim.AdamW:
    """With a group for every rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": each} for each in rates]
    return torch.optim.AdamW(groups, lr=RATE)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda of: lr_scheduler.StepLR(of, 3),
    "CosineAnnealingLR": lambda of: lr_scheduler.CosineAnnealingLR(of, 9, RATE / 5),
    "OneCycleLR": lambda of: lr_scheduler.OneCycleLR(of, 2 * RATE, total_steps=25),
    "SequentialLR": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of), lr_scheduler.CosineAnnealingLR(of, 9)], [3]
    ),
    "ChainedScheduler": lambda of: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(of)]),
    "SWALR": lambda of: SWALR(of, RATE / 5),
}
"""Schedules of torch, which have rates that only they know."""


def schedule_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of torch, or of transformers, by its name."""
    if name in OTHERS:
        return OTHERS[name](optimizer)
    floor = {"min_lr": RATE / 5} if "min_lr" in name else {}
    options = {"num_decay_steps": 8, "min_lr_ratio": 0.2} if "decay" in name else floor
    return get_scheduler(name, optimizer, 2, 20, options)


def advance(schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps before the optimizer's
        schedule.step()


@pytest.mark.parametrize("name", [*OTHERS, *(each.value for each in TYPE_TO_SCHEDULER_FUNCTION)])
def test_a_schedule_goes_on_at_its_rates(name: str) -> None:
    """Those of transformers which are functions of the step; others are not taken for these."""
    given, scale = [RATE, RATE / 2], [1.0, 0.5, 0.25, 0.5]
    source, grown_one = optimizer_of(given), optimizer_of([1.0] * 4)
    schedule = schedule_of(name, source)
    if not isinstance(schedule, lr_scheduler.LambdaLR):
        assert read_schedule(schedule.state_dict(), "here", 2) is None
        return
    for _ in range(4):
        advance(schedule)
    after, origins = schedule_of(name, grown_one), [0, 0, 1, 1]
    known = read_schedule(schedule.state_dict(), "here", 2)
    assert known
    pairs = list(zip(origins, scale, strict=True))
    after.load_state_dict(grown_schedule(known, [ParamGroup((), {}, by, of) for of, by in pairs]))
    for _ in range(15):
        advance(schedule)
        advance(after)
        expected = [source.param_groups[of]["lr"] * by for of, by in pairs]
        assert [group["lr"] for group in grown_one.param_groups] == pytest.approx(expected)


@pytest.mark.parametrize("rates", [[RATE, 1.0], RATE, ["a"], [float("inf")]])
def test_schedules_of_other_groups(rates: Any) -> None:
    state = schedule_of("linear", optimizer_of([RATE])).state_dict()
    assert read_schedule(state | {"base_lrs": [RATE] * 3}, "here", 1) == state
    with pytest.raises(InputError, match=r"here has a schedule with base_lrs = .* 1 groups"):
        read_schedule(state | {"base_lrs": rates}, "here", 1)
