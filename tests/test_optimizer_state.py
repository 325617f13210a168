"""The state of an optimizer, grown with the weights, and taken up by the engines themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoConfig,
)
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint import writing
from growkit.cli.app import app
from growkit.training import hidden_matrices, param_groups
from tests.conftest import folder_bytes, save_model, save_random
from tests.optimizer_state import (
    CONFIGS,
    DECAY,
    FORMATS,
    RATE,
    batch,
    goes_on,
    grown,
    load_torch,
    save_distributed,
    save_torch,
    trained,
    trainer,
)

LLAMA = {"num_key_value_heads": 4, "num_hidden_layers": 1}
PLAIN = {"hidden": "x2"}


@pytest.mark.parametrize("model", CONFIGS, ids=str)
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("engine", FORMATS)
@pytest.mark.sampled(3)
def test_training_continues_as_the_source_would(
    engine: str, times: int, model: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Three steps with the law's factors, by hand, from what the engine loads."""
    kind, config = model
    way = {"hidden": f"x{times}", "ffn": f"x{times}"}
    assert goes_on(tmp_path, kind, {**config, "num_hidden_layers": 1}, way, engine, times) < 1e-11


@pytest.mark.parametrize("engine", FORMATS)
def test_hashes_of_states_follow_their_writing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No large file is read again at the end."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    state = FORMATS[engine][0](*trained(source, 1), tmp_path / "state")
    followed, real = set[Path](), writing.Hashes.add

    def add(self: Any, *files: Path, **how: Any) -> None:
        followed.update(files if how.get("written") else ())
        real(self, *files, **how)

    monkeypatch.setattr(writing.Hashes, "add", add)
    grown(source, state, tmp_path / "out")
    assert growkit.check(tmp_path / "out")["whole"]
    written = {"torch": "optimizer.pt", "distributed": "__0_0.distcp"}[engine]
    assert {file.name for file in followed} == {"model.safetensors", written}


def doubled(folder: Path) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    state["state"][3]["exp_avg"] *= 2
    torch.save(state, folder / "optimizer.pt")


@pytest.mark.parametrize(
    "wrong", [{"wrong": "lr"}, {"wrong": "weight_decay"}, {"wrong": "eps"}, {"spoil": doubled}]
)
def test_a_wrong_factor_or_moment_shows(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert goes_on(tmp_path, "llama", LLAMA, PLAIN, "torch", **wrong) > 1e-9


def by_dimensions(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() > 1


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


@pytest.mark.parametrize("way", [{"ffn": "x2", "hidden": None}, None], ids=["wider", "deeper"])
def test_a_group_without_parameters_is_left_out(tmp_path: Path, way: Any) -> None:
    """Trainer has one for a model without biases and weights of norms; ``param_groups`` has none.

    torch.distributed.checkpoint cannot load one, and DeepSpeed takes it away.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = OlmoConfig(vocab_size=29, num_attention_heads=4, **sizes)
    source = save_random(tmp_path / "source", config)
    first = trainer(source, tmp_path / "run")
    optimizer = first.create_optimizer()
    assert [len(group["params"]) for group in optimizer.param_groups][1:] == [0]
    first.model(batch(0), labels=batch(0)).loss.backward()
    optimizer.step()
    state, out = save_torch(first.model, optimizer, tmp_path / "optimizer"), tmp_path / "out"
    if way:
        grown(source, state, out, way)
    else:
        growkit.grow(source, out, method="depth", layers="x2", optimizer=state, verify=False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again = torch.optim.AdamW(param_groups(model, out, lr=RATE))
    load_torch(model, again, out)
    before = {name: each.clone() for name, each in model.named_parameters()}
    model(batch(1), labels=batch(1)).loss.backward()
    again.step()
    assert all(not each.equal(before[name]) for name, each in model.named_parameters())
    empty = torch.optim.AdamW([*param_groups(model, out, lr=RATE), {"params": []}])
    with pytest.raises(ValueError, match="different number of parameter groups"):  # the control
        load_torch(model, empty, out)


def test_a_model_that_was_grown_twice_finds_its_groups_by_name(tmp_path: Path) -> None:
    """As the documents make them; ``param_groups`` knows the last growth alone (the control)."""
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
    assert rates[id(named["model.embed_tokens.weight"])] == pytest.approx(RATE)
    model(batch(1), labels=batch(1)).loss.backward()
    again.step()
    last = torch.optim.AdamW(param_groups(model, out, lr=RATE, decays=lambda *_: True))
    with pytest.raises(ValueError, match="parameter group"):
        last.load_state_dict(state)


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
    assert (verdict["kept"], verdict["unknown_files"]) == (True, [])
    content = bytearray((out / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (out / "optimizer.pt").write_bytes(content)
    verdict = growkit.verify(source, out, prompts=1, length=8)
    assert (verdict["kept"], verdict["changed"]) == (False, ["optimizer.pt"])


def test_an_order_that_was_assumed_is_reported(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Numbers alone do not tell an order with equal shapes from another; names do."""
    source, state = made
    output = ["--no-verify", "--optimizer", str(state), "--hidden", "x2"]
    ran = CliRunner().invoke(app, ["grow", str(source), str(tmp_path / "out"), *output])
    said = "does not name its parameters, which were assumed all in one group"
    assert (ran.exit_code, said in " ".join(ran.output.split())) == (0, True)
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert manifest["optimizer"]["assumed"] == "all in one group"
    again = grown(tmp_path / "out", tmp_path / "out", tmp_path / "again").optimizer
    assert again is not None
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
    assert found.optimizer is not None
    reset = found.optimizer.reset
    assert reset
    assert all(why for why in reset.values())
    kept = torch.load(tmp_path / "dint" / "optimizer.pt", weights_only=True)
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "dint")
    for (name, _), each in zip(new.named_parameters(), kept["state"].values(), strict=True):
        assert (name in reset) == (float(each["step"]) == 0) == bool((each["exp_avg"] == 0).all())


def test_experts_that_the_class_puts_together(tmp_path: Path) -> None:
    """Moments come apart as weights do when they are saved, and are put together when they load.

    After one step they are those that the grown model gathers itself.
    """
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    source = save_random(
        tmp_path / "source", MixtralConfig(num_local_experts=3, **sizes, **heads), 0, torch.float64
    )
    rest = {"lr": 0.0, "weight_decay": 0.0}
    model, optimizer = trained(source, 1, **rest)
    state = save_torch(model, optimizer, tmp_path / "optimizer")
    found = grown(source, state, tmp_path / "out")
    assert found.optimizer is not None
    assert found.optimizer.reset == {}
    kept = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    large, own = trained(tmp_path / "out", 1, **rest)
    for each, parameter in zip(kept.values(), large.parameters(), strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = own.state[parameter][kind]
            assert (each[kind] - expected).abs().max() <= 1e-12 * expected.abs().max()


class Malicious:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_bad_folders(tmp_path: Path) -> None:
    """A file that is missing or cut off, and code in what lists the entries."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model, optimizer = trained(source, 1)
    whole = save_distributed(model, optimizer, tmp_path / "whole")
    files = sorted(file for file in whole.rglob("*") if file.is_file())
    import pickle

    spoils: list[Callable[[Path], Any]] = [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(pickle.dumps(Malicious())),
    ]
    chosen = [files[0], files[-1]]
    for number, (file, spoil) in enumerate((f, s) for f in chosen for s in spoils):
        folder = tmp_path / f"state-{number}"
        shutil.copytree(whole, folder)
        spoil(folder / file.relative_to(whole))
        with pytest.raises(InputError):
            grown(source, folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    assert grown(source, whole, tmp_path / "out").optimizer


@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
def test_muon_goes_on(adjusted: str, tmp_path: Path) -> None:
    """A step of the grown model is the grown step of the source, for the matrices inside."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model = AutoModelForCausalLM.from_pretrained(source)
    inside = [p for name, p in model.named_parameters() if name in hidden_matrices(model)]
    settings = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": adjusted}
    optimizer = torch.optim.Muon(inside, **settings)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(batch(0), labels=batch(0)).loss.backward()
        optimizer.step()
        model.zero_grad()

    step(model, optimizer)
    model.save_pretrained(source)
    out = tmp_path / "out"
    grown(source, save_torch(model, optimizer, tmp_path / "state"), out)
    large = AutoModelForCausalLM.from_pretrained(out)
    new = torch.optim.Muon(param_groups(large, out, optimizer="muon", **settings))
    made = [group[key] for group in new.param_groups for key in ("lr", "weight_decay")]
    load_torch(large, new, out)
    loaded = [group[key] for group in new.param_groups for key in ("lr", "weight_decay")]
    assert loaded == pytest.approx(made)
    begun = {name: each.clone() for name, each in large.state_dict().items()}
    step(model, optimizer)
    step(large, new)
    model.save_pretrained(source)
    grown(source, None, tmp_path / "expected")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "expected").state_dict()
    for name in hidden_matrices(large):
        moved = (expected[name] - begun[name]).norm()
        assert (large.state_dict()[name] - expected[name]).norm() < 0.02 * moved, name
        assert moved > 0
