"""An optimizer's moments, grown beside the weights, against those that the grown model gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growkit
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import cut
from growkit.engine.strict import strict_float64
from growkit.recipe.files import parse_recipe
from growkit.recipe.planner import plan
from tests.conftest import load_strict

Make = Callable[..., Path]
MULTI_HEAD = {"num_key_value_heads": 4}

GROWTHS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"grow": "hypercloning", "hidden": "x2"}, MULTI_HEAD),
    ("llama", {"grow": "hypercloning", "hidden": "x4", "ffn": "x2", "kv_heads": "x1"}, {}),
    (
        "llama",
        {"grow": "hypercloning", "hidden": "x2", "ffn": "x4", "kv_heads": "x1"},
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    ("diffllama", {"grow": "hypercloning", "hidden": "x2"}, MULTI_HEAD),
    ("diffllama", {"grow": "group-diff", "hidden": "x2", "signal_heads": "x4"}, MULTI_HEAD),
]


class InMemory:
    """Tensors by name, to be read like those of a checkpoint."""

    def __init__(self, like: Any, contents: Mapping[str, Tensor]) -> None:
        self.tensors, self._contents = like.tensors, contents

    def where(self, name: str | None = None) -> str:
        return "memory"

    def read(self, name: str, *where: slice | None) -> Tensor:
        return cut(self._contents[name], where)


def gathered(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What AdamW gathers of some batches with a model that it leaves as it is, by tensor."""
    model = load_strict(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    batches = torch.randint(29, (3, 2, 12), generator=torch.Generator().manual_seed(0))
    for ids in batches:
        optimizer.zero_grad()
        with strict_float64():
            logits = model(ids).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
        optimizer.step()
    return {name: optimizer.state[each] for name, each in model.named_parameters()}


@pytest.mark.parametrize(("kind", "step", "config"), GROWTHS, ids=str)
def test_moments_are_those_that_the_grown_model_gathers(
    kind: str, step: dict[str, Any], config: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    source = make(kind, dtype=torch.float64, **config)
    steps = [{**step, "symmetry": "keep"}]
    content = {"source": str(source), "output": str(tmp_path / "out"), "steps": steps}
    recipe = parse_recipe(content | {"verify": False}, "recipe")
    growkit.run(recipe)
    before, after = gathered(source), gathered(tmp_path / "out")
    checkpoint = Checkpoint(source)
    plans = plan(recipe, checkpoint).lineage.plans
    for order, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        state: Any = InMemory(
            checkpoint, {name: state_of[key] for name, state_of in before.items()}
        )
        for each in plans:
            made = {}
            for rule in each.rules:
                moments = rule.transform.moments(order)
                assert moments is not None
                made[rule.target] = moments.part(state, [slice(0, n) for n in rule.info.shape])
                half = [slice(n // 3, n) for n in rule.info.shape]
                assert moments.part(state, half).equal(made[rule.target][tuple(half)])
            infos = type("Infos", (), {"tensors": {rule.target: rule.info for rule in each.rules}})
            state = InMemory(infos, made)
        for name, found in made.items():
            scale = after[name][key].abs().max()
            assert (found - after[name][key]).abs().max() <= 1e-11 * scale, (name, key)


def test_moments_as_they_are_would_not_do(make: Make, tmp_path: Path) -> None:
    """The control of the test above: weights' own transforms are wrong for moments."""
    source = make("llama", dtype=torch.float64, **MULTI_HEAD)
    content = {"source": str(source), "output": str(tmp_path / "out"), "verify": False}
    content["steps"] = [{"grow": "hypercloning", "hidden": "x2", "symmetry": "keep"}]
    recipe = parse_recipe(content, "recipe")
    growkit.run(recipe)
    before, after = gathered(source), gathered(tmp_path / "out")
    checkpoint = Checkpoint(source)
    state: Any = InMemory(checkpoint, {name: each["exp_avg"] for name, each in before.items()})
    rule = plan(recipe, checkpoint).lineage.plans[0].by_target["model.embed_tokens.weight"]
    wrong = rule.transform.part(state, [slice(0, n) for n in rule.info.shape])
    right = after[rule.target]["exp_avg"]
    assert (wrong - right).abs().max() > 0.1 * right.abs().max()


def test_what_is_computed_has_no_moments(make: Make, tmp_path: Path) -> None:
    """Nor have rows that come twice, for two purposes."""
    checkpoint = Checkpoint(make("llama"))
    content = {"source": "a", "output": "b", "steps": [{"convert": "diff-v2"}]}
    plans = plan(parse_recipe(content, "recipe"), checkpoint).lineage.plans
    rules = {rule.target: rule.transform for rule in plans[-1].rules}
    queries = rules["model.layers.0.self_attn.q_proj.weight"]
    assert queries.moments(1) is None
    doubled = rules["model.layers.0.self_attn.o_proj.weight"].moments(2)
    assert doubled is not None
    ones: Any = InMemory(checkpoint, {name: torch.ones(16, 16) for name in doubled.sources})
    assert doubled.part(ones, [slice(0, 16)] * 2).unique().tolist() == [0.25]
