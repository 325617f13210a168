"""The law of updates: grown models learn what their sources would have, and wrong factors show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import DataParallel
from transformers import AutoModelForCausalLM

import growkit
from growkit import training
from growkit.algebra.update_law import Update
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.engine.recipe_planning import plan_recipe
from growkit.extras.optimizer.checks.trained_alike import (
    StatePaths,
    compare_states,
    prove_training,
    state_paths,
)
from growkit.extras.optimizer.results.training_section import TrainingSection
from growkit.extras.optimizer.state import written_in
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.manifest import read_record
from growkit.planning.recipe import parse_recipe
from growkit.planning.updates import law_of
from growkit.proof.weights import lineage_of
from growkit.training import param_groups
from tests.commands import cli
from tests.files import edit_json, listed
from tests.models import Make, distance, load_strict, logits_of, save_model, seeded
from tests.test_optimizer_state import DECAY, FORMATS, Both, batch, grown, save_torch, step, trained

RATE = 1e-3
EPS = 1e-12
"""So small that it makes no difference that one serves rows with different gradients."""


@dataclass(frozen=True)
class Case:
    """A model and what is done to it.

    Attributes:
        kind: of the model.
        steps: of the recipe.
        config: of the model.
        first: steps of the recipe that make the source itself.
        why: a part of the reason why the law does not reach it; empty where it does.
    """

    kind: str
    steps: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    first: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.config} {self.first or ''} {self.steps}"


MULTI_HEAD = {"num_key_value_heads": 4}
GROUPED = {"grow": "group-diff", "hidden": "x2", "signal_heads": "x4", "symmetry": "keep"}
CASES = [Case(**each) for each in listed("training_law", "cases")]


@dataclass
class Pair:
    """A source that has been trained, and what it was grown to, with the optimizer's state."""

    source: Path
    target: Path
    optimizer: torch.optim.Optimizer
    recipe: growkit.Recipe
    engine: str

    @classmethod
    def of(cls, case: Case, folder: Path, engine: str = "torch") -> Pair:
        source = folder / "source"
        save_model(source, case.kind, 0, torch.float64, **case.config)
        for number, each in enumerate(case.first):
            made = folder / f"first-{number}"
            growkit.run(_recipe(source, made, [each]))
            source = made
        model, optimizer = trained(source, 2, lr=RATE, eps=EPS)
        recipe = _recipe(source, folder / "target", case.steps)
        if not case.why:
            state = FORMATS[engine][0](model, optimizer, folder / "state")
            recipe = replace(recipe, optimizer=str(state))
        growkit.run(recipe)
        return cls(source, folder / "target", optimizer, recipe, engine)

    @property
    def lineage(self) -> Any:
        return plan_recipe(self.recipe, Checkpoint(self.source)).lineage

    def apart(self, wrong: str = "", steps: int = 6) -> tuple[float, float]:
        """How far losses, and logits at the end against their scale, are apart after more steps.

        Args:
            wrong: a setting of the target's largest group, or a moment of a parameter, to double.
            steps: of both.
        """
        new = {name for name, each in law_of(self.lineage).updates.items() if each.new}
        source, target = load_strict(self.source), load_strict(self.target)
        rates = {"lr": RATE, "weight_decay": DECAY, "eps": EPS}
        groups = param_groups(target, self.target, **rates, decays=lambda *_: True)
        optimizers = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(groups)
        optimizers[0].load_state_dict(self.optimizer.state_dict())
        FORMATS[self.engine][1](target, optimizers[1], self.target)
        group = max(optimizers[1].param_groups, key=lambda each: len(each["params"]))
        if wrong in group:
            group[wrong] *= 2
        elif wrong:
            optimizers[1].state[group["params"][0]][wrong] *= 2
        for name, parameter in target.named_parameters():
            parameter.requires_grad_(name not in new)
        found = []
        for model, optimizer in zip((source, target), optimizers, strict=True):
            losses = [step(model, optimizer, number) for number in range(2, 2 + steps)]
            found.append((losses, logits_of(model, batch(100))))
        (expected, before), (losses, after) = found
        furthest = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
        return furthest, distance(before, after)


def _recipe(source: Path, output: Path, steps: list[dict[str, Any]]) -> growkit.Recipe:
    content = {"source": str(source), "output": str(output), "steps": steps, "verify": False}
    return parse_recipe(content, "recipe")


def test_one_eps_is_the_nearest_to_those_of_all_rows() -> None:
    """Adam divides by √v + eps: rows whose gradient is that of n copies need an nth of it."""
    random = seeded(11)
    for _ in range(20):
        n_out = np.array([random.randrange(1, 9) for _ in range(random.randrange(1, 5))])
        update = Update(n_out=n_out, factor=random.uniform(0.2, 3))
        rows = n_out * update.factor
        others = np.linspace(0.01, 5, 3_000) / update.factor
        changes = np.abs(np.outer(others, rows) - 1).max(1)
        assert np.abs(update.eps * rows - 1).max() <= changes.min()


QUICK: dict[str, Any] = {"prompts": 1, "length": 12}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Group-differentiated growth, of which some rows have other gradients than others."""
    return Pair.of(Case("diffllama", [GROUPED], MULTI_HEAD), tmp_path_factory.mktemp("grouped"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("engine", FORMATS)
@pytest.mark.sampled(1)
def test_training_continues_as_that_of_the_source(engine: str, case: Case, tmp_path: Path) -> None:
    """Where the law reaches, from the engine's files; else it says why not, and the proof knows."""
    pair = Pair.of(case, tmp_path, engine)
    why = law_of(pair.lineage).why
    assert case.why in "; ".join(why)
    if not case.why:
        assert why == ()
        assert max(pair.apart()) < 1e-11
    found = growkit.verify(pair.source, pair.target, **QUICK, steps=2).sections.training
    assert found.findings[0].kept is (None if case.why else True)


@pytest.mark.parametrize("wrong", ["lr", "weight_decay", "exp_avg", "exp_avg_sq"])
def test_a_wrong_factor_or_moment_shows(wrong: str, grouped: Pair) -> None:
    assert max(grouped.apart(wrong)) > 1e-9


def test_random_splits_part_and_are_kept(make: Make, tmp_path: Path) -> None:
    source = make("llama", **MULTI_HEAD)
    settings = Settings(**QUICK, steps=1)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=settings)
    assert result["kept"]
    trained = result["verification"].sections.training
    (finding,) = trained.findings
    assert finding.kept is None
    assert "split at random" in finding.sentence
    assert "--symmetry keep" in finding.sentence
    assert trained["relative"] > 1e-6


def test_new_layers_stand_still(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", method="depth", layers="x2", verify=False)
    trained = growkit.verify(source, tmp_path / "out", **QUICK, steps=1).sections.training
    assert trained.findings[0].kept
    assert trained["standing_still"] == 18


def test_groups_of_a_grown_model(make: Make, tmp_path: Path) -> None:
    """The table of the documents, by the model's own names."""
    source = make("llama", tie_word_embeddings=True, **MULTI_HEAD)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    groups = training.param_groups(model, tmp_path / "out", lr=0.1, weight_decay=0.1, eps=1e-6)
    torch.optim.AdamW(groups)
    by_id = {id(each): group for group in groups for each in group["params"]}
    found = {
        name: tuple(by_id[id(each)][key] for key in ("lr", "weight_decay", "eps"))
        for name, each in model.named_parameters()
    }
    assert found["model.embed_tokens.weight"] == (0.1, 0.1, 5e-7)
    assert found["model.layers.1.mlp.up_proj.weight"] == (0.05, 0.2, 5e-7)
    assert found["model.layers.0.input_layernorm.weight"] == (0.1, 0.0, 5e-7)
    assert found["model.norm.weight"] == (0.05, 0.0, 1e-6)
    assert len(by_id) == len(found)
    with pytest.raises(growkit.InputError, match=r"has shape \[29, 16\], but \[29, 32\]"):
        training.param_groups(
            AutoModelForCausalLM.from_pretrained(source), tmp_path / "out", lr=0.1
        )
    with pytest.raises(growkit.InputError, match="has no parameter of the Linear"):
        training.param_groups(torch.nn.Linear(2, 2), tmp_path / "out", lr=0.1)
    with pytest.raises(growkit.InputError, match="'moun' is not known"):
        training.param_groups(model, tmp_path / "out", lr=0.1, optimizer="moun")
    manifest = tmp_path / "out" / "growkit.json"
    with edit_json(manifest) as content:
        content["updates"]["groups"][0]["lr"] = -1
    with pytest.raises(growkit.InputError, match="is not what growkit writes"):
        training.param_groups(model, tmp_path / "out", lr=0.1)
    manifest.unlink()
    with pytest.raises(growkit.InputError, match=r"has no growkit\.json"):
        training.param_groups(model, tmp_path / "out", lr=0.1)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, DataParallel])
def test_wrapped_models_have_the_same_groups(
    wrap: Callable[[Any], Any], make: Make, tmp_path: Path
) -> None:
    """Whether the wrapper leaves itself out of the names of parameters or not."""
    out = tmp_path / "out"
    growkit.grow(make("diffllama"), out, method="depth", layers="x2", verify=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = training.param_groups(model, out, lr=0.1, weight_decay=0.1)
    found = training.param_groups(wrap(model), out, lr=0.1, weight_decay=0.1)
    assert [[*map(id, group.pop("params"))] for group in found] == [
        [*map(id, group.pop("params"))] for group in expected
    ]
    assert found == expected
    assert [group["weight_decay"] > 0 for group in found] == [True, False]


def test_training_that_cannot_be_proved(tmp_path: Path) -> None:
    source = save_model(tmp_path / "one", "llama")
    other = save_model(tmp_path / "other", "llama")
    with pytest.raises(growkit.InputError, match="no manifest records how the target was made"):
        growkit.verify(source, other, **QUICK, steps=1)


LLAMA = {"num_hidden_layers": 1}


def pair(place: Path, **options: Any) -> tuple[Path, Path, Path]:
    """A source that has been trained, the state of its optimizer, and what both were grown to."""
    source = save_model(place / "source", "llama", dtype=torch.float64, **LLAMA)
    model = load_strict(source)
    every = list(model.parameters())
    decayed = [each for each in every if each.dim() > 1]
    others = [each for each in every if each.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 1e-2, "betas": (0.8, 0.9), **options})
    for number in range(3):
        step(model, optimizer, number)
    model.save_pretrained(source)
    state = save_torch(model, optimizer, source / "state")
    grown(source, state, place / "out")
    return source, state, place / "out"


def lineage_between(source: Path, out: Path) -> Any:
    """How the target was made."""
    after = Checkpoint(out)
    return lineage_of(Checkpoint(source), after, read_record(after.opened))


def unlike(source: Path, out: Path, state: Path) -> str:
    """What in the target's state does not grow from the source's."""
    before, after, lineage = Checkpoint(source), Checkpoint(out), lineage_between(source, out)
    places = StatePaths(state, written_in(out))
    return compare_states(places, before, after, lineage, law_of(lineage))[2]


def proved(source: Path, out: Path, state: Path) -> TrainingSection:
    """The proof of the training alone."""
    before, after, lineage = Checkpoint(source), Checkpoint(out), lineage_between(source, out)
    places = StatePaths(state, written_in(out))
    settings = Settings(**QUICK, steps=1)
    return prove_training(before, after, lineage, settings, torch.device("cpu"), places)


Fault = tuple[str, Callable[[Any], None]]
"""What is said of it, and what it does to the content of an ``optimizer.pt``."""


def faults(content: Any) -> Iterator[Fault]:
    """Every setting of every group, every kind of moment of every parameter, and a step."""
    for number in range(len(content["param_groups"])):
        for key in ("lr", "weight_decay", "eps"):

            def group(found: Any, number: int = number, key: str = key) -> None:
                found["param_groups"][number][key] *= 2

            yield f"{key} of", group
    for number, kept in content["state"].items():
        for kind in sorted(kept.keys() - {"step"}):

            def moment(found: Any, number: int = number, kind: str = kind) -> None:
                found["state"][number][kind][..., :3] *= 2

            yield f"{kind} of", moment

    def later(found: Any) -> None:
        found["state"][2]["step"] += 1

    yield "the step of", later


@contextmanager
def spoiled_file(out: Path, spoil: Callable[[Any], None]) -> Iterator[None]:
    """With a fault in the file of a state, for a while."""
    file = out / "optimizer.pt"
    whole = file.read_bytes()
    content = torch.load(file, weights_only=True)
    spoil(content)
    torch.save(content, file)
    try:
        yield
    finally:
        file.write_bytes(whole)


@pytest.fixture(scope="module")
def amsgrad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return pair(tmp_path_factory.mktemp("trained"), amsgrad=True)


def test_it_begins_with_the_states(amsgrad: tuple[Path, Path, Path]) -> None:
    """They lie in the source's folder, where the manifest names them, and in the target's."""
    source, _, out = amsgrad
    arguments = ["verify", str(source), str(out), "--steps", "2", "--json"]
    found = cli(*arguments, "--prompts", "1", "--length", "12")
    assert found.exit_code == 0, found.stderr
    training = json.loads(found.stdout)["sections"]["training"]
    (finding,) = training["findings"]
    assert (
        training["begun"] == f"the optimizers' states in {source}/state.pt and {out}/optimizer.pt"
    )
    assert finding["kept"]
    assert training["control_caught"]
    assert training["relative"] < training["tolerance"] < 1e-11
    assert len(training["losses_target"]) == 3
    assert "its optimizer's state is the source's, grown" in finding["sentence"]


def test_every_wrong_factor_and_moment_is_read(amsgrad: tuple[Path, Path, Path]) -> None:
    source, state, out = amsgrad
    assert unlike(source, out, state) == ""
    content = torch.load(out / "optimizer.pt", weights_only=True)
    assert len(content["param_groups"]) > 3
    every = list(faults(content))
    settings = [each for each in every if each[0] in ("lr of", "weight_decay of", "eps of")]
    for said, spoil in [*seeded(1).sample(settings, 3), *seeded(2).sample(every, 2), every[-1]]:
        with spoiled_file(out, spoil):
            assert unlike(source, out, state).startswith(said)


def test_a_wrong_moment_is_trained_with(amsgrad: tuple[Path, Path, Path]) -> None:
    source, state, out = amsgrad
    every = list(faults(torch.load(out / "optimizer.pt", weights_only=True)))
    moments = ("exp_avg of", "max_exp_avg_sq of")
    said, spoil = seeded(6).choice([each for each in every if each[0] in moments])
    with spoiled_file(out, spoil):
        proof = proved(source, out, state)
    (finding,) = proof.findings
    assert finding.kept is False
    assert f"not the source's, grown: {said}" in finding.sentence
    assert proof.relative > proof.tolerance, said


def test_states_that_are_not_tried(amsgrad: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A manifest has nothing read outside the two folders; what is not tried is said."""
    source, state, out = amsgrad
    before, after = Checkpoint(source), Checkpoint(out)
    recipe = read_record(after.opened)
    assert recipe
    assert state_paths(before, after, recipe, None).source == state
    elsewhere = replace(recipe, optimizer=f"../{tmp_path.name}")
    assert state_paths(before, after, elsewhere, None).source is None
    places = state_paths(before, after, elsewhere, None)
    assert "was not tried, since the source's state is not in its folder" in places.untried
    bare = tmp_path / "bare"
    growkit.grow(source, bare, hidden="x2", symmetry="keep", verify=False)
    assert not state_paths(
        before, Checkpoint(bare), read_record(Checkpoint(bare).opened), None
    ).untried
    with pytest.raises(InputError, match="holds no optimizer's state that could be compared"):
        growkit.verify(source, bare, **QUICK, steps=1, optimizer=state)
    with pytest.raises(InputError, match="add --steps"):
        growkit.verify(source, out, **QUICK, optimizer=state)


@pytest.mark.parametrize("half", [0, 1], ids=["adamw", "muon"])
def test_the_state_of_one_of_two_optimizers_is_compared_alone(half: int, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", dtype=torch.float64, **LLAMA)
    model = load_strict(source)
    both = Both(model, None)
    step(model, both, 0)
    model.save_pretrained(source)
    state, out = save_torch(model, both.all[half], tmp_path / "state"), tmp_path / "out"
    grown(source, state, out)
    proof = proved(source, out, state)
    assert proof.findings[0].kept
    assert proof.begun == "the moments of a first batch"
    every = list(faults(torch.load(out / "optimizer.pt", weights_only=True)))
    moments = ("exp_avg of", "momentum_buffer of")[half]
    with spoiled_file(out, next(spoil for said, spoil in every if said == moments)):
        assert unlike(source, out, state).startswith(moments)
