"""Grown models train as their sources would have.

A source takes some steps, is grown with its moments, and both take more, with torch's AdamW and the
groups of ``growkit.training.param_groups``, transformers' classes, and strict float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, MixtralConfig, OPTConfig

import growkit
from growkit.base.settings import Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.strict import strict_float64
from growkit.engine.training import MOMENTS
from growkit.optimizer.groups import class_updates
from growkit.optimizer.growing import grown_moments
from growkit.planning.updates import Update, law_of
from growkit.proof import training as proof
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import parse_recipe
from growkit.training import param_groups
from tests.conftest import load_strict, save_model, save_random

RATE, DECAY = 1e-3, 0.1
EPS = 1e-12
"""So small that it makes no difference that one serves rows with different gradients."""

UNSEEN = 1e-11
"""A hundred times what rounding does; wrong factors must do more."""

TOKENS = 29
SMALL = {"vocab_size": TOKENS, "bos_token_id": None, "eos_token_id": None}
KEEP = {"symmetry": "keep"}


@dataclass(frozen=True)
class Case:
    """A model and what is done to it.

    Attributes:
        kind: of ``save_model``, or of ``OTHERS``.
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


def hypercloning(**sizes: str) -> list[dict[str, Any]]:
    return [{"grow": "hypercloning", **sizes, **KEEP}]


OTHERS = {
    "gpt2": lambda: GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=64, **SMALL),
    "opt": lambda: OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        pad_token_id=1,
        dropout=0.0,
        **SMALL,
    ),
    "mixtral": lambda: MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        **SMALL,
    ),
}
EVERYTHING = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
GROUPED = [{"grow": "group-diff", "hidden": "x2", "signal_heads": "x4", **KEEP}]
MULTI_HEAD = {"num_key_value_heads": 4}

CASES = [
    Case("llama", hypercloning(hidden="x2"), MULTI_HEAD),
    Case("llama", hypercloning(hidden="x2"), {"tie_word_embeddings": True}),
    Case("llama", hypercloning(hidden="x4", kv_heads="x2", ffn="x2"), EVERYTHING),
    Case("llama", hypercloning(hidden="x4", kv_heads="x1", ffn="x2")),
    Case("gpt2", hypercloning(hidden="x2")),
    Case("opt", hypercloning(hidden="x2")),
    Case("mixtral", hypercloning(hidden="x2")),
    Case("mixtral", [{"grow": "experts", "experts": 8, **KEEP}]),
    Case("diffllama", hypercloning(hidden="x2"), MULTI_HEAD),
    Case("diffllama", hypercloning(hidden="x2")),
    Case("diffllama", GROUPED, MULTI_HEAD),
    Case("diffllama", [GROUPED[0] | {"noise_heads": "x2", "kv_heads": "x2"}]),
    Case("diffllama", GROUPED, MULTI_HEAD, first=[{"convert": "dint", "gamma": "unified"}]),
    Case("diffllama", [*GROUPED, *hypercloning(hidden="x2")], MULTI_HEAD),
    Case("llama", [{"grow": "depth", "layers": "x2"}]),
    Case("llama", [{"grow": "depth", "layers": "x2"}, *hypercloning(hidden="x2")], MULTI_HEAD),
    Case("llama", hypercloning(hidden="x3"), why="unequal shares"),
    Case("llama", [{"grow": "hypercloning", "hidden": "x2"}], MULTI_HEAD, why="at random"),
    Case("llama", hypercloning(hidden="x2", heads="x4", kv_heads="x8"), why="different heads"),
    Case("llama", hypercloning(hidden="x2", ffn="36"), MULTI_HEAD, why="copied unevenly"),
    Case("llama", [{"grow": "upcycle", "experts": 4}], MULTI_HEAD, why="a new router"),
    Case("llama", [{"convert": "diff-v2"}], MULTI_HEAD, why="play parts of their own"),
    Case("llama", [{"grow": "hypercloning", "vocab": 40}], why="copy nothing"),
    Case("llama", [{"grow": "depth", "layers": "x2", "blocks": "stack"}], why="train apart"),
    Case(
        "llama",
        [{"grow": "hypercloning", "hidden": "x2", "untie": True, **KEEP}],
        {"tie_word_embeddings": True, **MULTI_HEAD},
        why="train apart",
    ),
]


def batches(count: int, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(TOKENS, (2, 16), generator=generator) for _ in range(count))


def train(model: Any, optimizer: torch.optim.Optimizer, data: Iterator[Tensor]) -> list[float]:
    losses = []
    for ids in data:
        optimizer.zero_grad()
        with strict_float64():
            logits = model(ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@dataclass
class Pair:
    """A source that has been trained, what it was grown to, and the state of its optimizer."""

    source: Path
    target: Path
    state: dict[str, dict[str, Tensor]]
    steps: int
    recipe: growkit.Recipe

    @classmethod
    def of(cls, case: Case, folder: Path, steps: int = 5, seed: int = 0) -> Pair:
        source = folder / "source"
        if case.kind in OTHERS:
            save_random(source, OTHERS[case.kind](), seed, torch.float64)
        else:
            save_model(source, case.kind, seed, torch.float64, **case.config)
        for number, step in enumerate(case.first):
            made = folder / f"first-{number}"
            growkit.run(_recipe(source, made, [step]))
            source = made
        model = load_strict(source)
        optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=DECAY)
        train(model, optimizer, batches(steps))
        trained = folder / "trained"
        model.save_pretrained(trained)
        recipe = _recipe(trained, folder / "target", case.steps)
        growkit.run(recipe)
        state = {name: optimizer.state[each] for name, each in model.named_parameters()}
        return cls(trained, folder / "target", state, steps, recipe)

    @property
    def lineage(self) -> Any:
        return plan_recipe(self.recipe, Checkpoint(self.source)).lineage

    def apart(self, steps: int = 30) -> tuple[float, float]:
        """How far losses, and logits at the end against their scale, are apart after more steps."""
        before, after = Checkpoint(self.source), Checkpoint(self.target)
        new = {name for name, each in law_of(self.lineage).updates.items() if each.new}
        moments = {n: {k: each[k] for k in MOMENTS} for n, each in self.state.items()}
        grown = grown_moments(moments, before, after, self.lineage.plans)
        found = []
        for folder, state in ((self.source, moments), (self.target, grown)):
            model = load_strict(folder)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(folder == self.source or name not in new)
            groups: Any = [{"params": list(model.parameters()), "lr": RATE, "weight_decay": DECAY}]
            if folder == self.target:
                groups = param_groups(
                    model, folder, lr=RATE, weight_decay=DECAY, eps=EPS, decays=lambda *_: True
                )
            optimizer = torch.optim.AdamW(groups, eps=EPS)
            for name, parameter in model.named_parameters():
                step = torch.tensor(float(self.steps))
                optimizer.state[parameter] = {"step": step} | {
                    key: state[name][key].clone() for key in MOMENTS
                }
            losses = train(model, optimizer, batches(steps, seed=1))
            with strict_float64(), torch.no_grad():
                found.append((losses, model(next(batches(1, seed=2))).logits))
        (expected, before_logits), (losses, logits) = found
        return (
            max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
            float((logits - before_logits).abs().max() / before_logits.square().mean().sqrt()),
        )


def _recipe(source: Path, output: Path, steps: list[dict[str, Any]]) -> growkit.Recipe:
    content = {"source": str(source), "output": str(output), "steps": steps, "verify": False}
    return parse_recipe(content, "recipe")


@dataclass(frozen=True, eq=False)
class OtherDecay(Update):
    """Weight decay twice as large as it should be; the rate is right."""

    @property
    def decay(self) -> float:
        return 2 * super().decay


@dataclass(frozen=True, eq=False)
class OtherRate(Update):
    """A rate twice as large as it should be; the factor of weight decay is right."""

    @property
    def rate(self) -> float:
        return 2 * super().rate

    @property
    def decay(self) -> float:
        return 2 / self.rate


FAULTS = {
    "rate": lambda update: OtherRate(**vars(update)),
    "decay": lambda update: OtherDecay(**vars(update)),
    "eps": lambda update: replace(update, n_out=update.n_out * 2),
}


def spoiled(updates: dict[str, Update]) -> Iterator[tuple[str, dict[str, Update]]]:
    """Every factor of every group of tensors, set wrong by itself."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, each in updates.items():
        if not each.new:
            key = (each.rate, *each.gradient.flat)
            kinds.setdefault(key, []).append(name)
    for names in kinds.values():
        for what, fault in FAULTS.items():
            made = {name: fault(updates[name]) for name in names}
            yield f"{what} of {names[0]}", updates | made


def trained_with(pair: Pair, steps: int = 2) -> tuple[dict[str, Update], Callable[..., float]]:
    """The factors of a pair, and how far its target is apart that is trained with others.

    All factors have something to do in the proof's own training: eps is large, everything decays.
    """
    before, after = Checkpoint(pair.source), Checkpoint(pair.target)
    batches = proof._batches(Settings(steps=steps, length=16), before)
    updates = class_updates(after, law_of(pair.lineage).updates)
    device = torch.device("cpu")
    state, grown = proof.first_moments(before, after, pair.lineage, batches[0], device)
    expected = proof._trained(pair.source, state, batches, device)

    def apart(factors: dict[str, Update]) -> float:
        return expected.apart(proof._trained(pair.target, grown, batches, device, factors))

    return updates, apart
