"""Mistakes of conversions are named, and nothing is said of sound models."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import growkit
from growkit.proof.diagnosis import Diagnosis, explain_weights
from growkit.sources import find
from tests.conftest import edit_weights, save_model

State = dict[str, torch.Tensor]
HEADS, GROUPS, WIDTH = 4, 2, 4


def of_layers(*names: str, layers: tuple[int, ...] = (0, 1)) -> list[str]:
    return [f"model.layers.{layer}.{name}.weight" for layer in layers for name in names]


def edited(edit: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in names:
            state[name] = edit(state[name]).contiguous()

    return change


def exchanged(*pairs: tuple[str, str]) -> Callable[[State], None]:
    def change(state: State) -> None:
        for one, other in pairs:
            state[one], state[other] = state[other].clone(), state[one].clone()

    return change


def neighbours(rows: torch.Tensor) -> torch.Tensor:
    """As Meta and llama.cpp store rotary pairs."""
    return rows.view(-1, 2, WIDTH // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def halves(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, WIDTH // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def cut_by_groups(state: State) -> None:
    """A fused matrix in the order of groups is cut as if all queries came first."""
    q, k, v = names = of_layers(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", layers=(1,)
    )
    parts = [state[name].chunk(GROUPS) for name in names]
    fused = torch.cat([part for group in zip(*parts, strict=True) for part in group])
    sizes = [len(state[name]) for name in names]
    state |= {n: t.clone() for n, t in zip((q, k, v), fused.split(sizes), strict=True)}


QK = of_layers("self_attn.q_proj", "self_attn.k_proj")
OUTPUT = of_layers("self_attn.o_proj", layers=(1,))
NORMS = of_layers("input_layernorm", layers=(0,))
MISTAKES: dict[str, tuple[str, Callable[[State], None], str]] = {
    "neighbours": ("llama", edited(neighbours, *QK), "k_proj.weight of all layers has the rows of"),
    "halves": ("llama", edited(halves, *QK[:1]), "self_attn.q_proj.weight of layer 0 has the rows"),
    "K and V": (
        "llama",
        exchanged((QK[1], QK[1].replace("k_", "v_"))),
        "self_attn.k_proj.weight of layer 0 holds self_attn.v_proj.weight of the source",
    ),
    "gate and up": (
        "llama",
        exchanged(tuple(of_layers("mlp.gate_proj", "mlp.up_proj", layers=(1,)))),
        "mlp.up_proj.weight of layer 1 holds mlp.gate_proj.weight of the source",
    ),
    "shifted layers": (
        "llama",
        exchanged(tuple(of_layers("mlp.down_proj"))),
        "mlp.down_proj.weight of layer 0 holds the source's layer that is 1 after",
    ),
    "transposed": (
        "llama",
        edited(lambda t: t.T, *OUTPUT),
        "o_proj.weight of layer 1 is transposed",
    ),
    "norms": ("gemma3_text", edited(lambda t: t + 1, *NORMS), "of layer 0 has 1 added"),
    "tied head": (
        "llama",
        lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}),
        "lm_head.weight holds model.embed_tokens.weight",
    ),
    "rounded": (
        "llama",
        edited(lambda t: t.half().float(), *OUTPUT),
        "o_proj.weight of layer 1 is rounded to float16",
    ),
    "rounded twice": (
        "llama",
        edited(lambda t: t.bfloat16().half().float(), *OUTPUT),
        "o_proj.weight of layer 1 is rounded to bfloat16",
    ),
    "groups": ("llama", cut_by_groups, "is cut from queries, keys and values in the order of"),
    "zero": (
        "qwen2",
        lambda state: state["model.layers.0.self_attn.v_proj.bias"].zero_(),
        "self_attn.v_proj.bias of layer 0 is zero",
    ),
    "experts": (
        "mixtral",
        exchanged(
            tuple(of_layers(*(f"block_sparse_moe.experts.{n}.w2" for n in (0, 2)), layers=(1,)))
        ),
        "w2.weight of layer 1 holds another expert of the source",
    ),
}


def diagnosis_of(source: Path, target: Path) -> Diagnosis | None:
    before, after = (find(folder).open() for folder in (source, target))
    return explain_weights(before, after)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, mistake: str) -> None:
    kind, change, told = MISTAKES[mistake]
    seed = len(mistake)
    sizes = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "hidden_size": HEADS * WIDTH,
    }
    source = save_model(tmp_path / "source", kind, seed, **sizes)
    target = shutil.copytree(source, tmp_path / "target")
    assert diagnosis_of(source, target) is None
    with edit_weights(target) as state:
        change(state)
    section = diagnosis_of(source, target)
    assert section
    assert told in section.findings[0].sentence
    assert not section.unexplained


def test_a_verdict_says_what_the_mistake_was(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        exchanged(tuple(of_layers("mlp.gate_proj", "mlp.up_proj", layers=(1,))))(state)
    result = growkit.verify(source, target, prompts=1, length=12)
    assert "mlp.gate_proj.weight of layer 1 holds mlp.up_proj.weight" in result["reason"]
    assert result["fault"]["tensor"] == "model.layers.1.mlp.gate_proj.weight"


def test_a_model_that_computes_the_same_has_no_diagnosis(tmp_path: Path) -> None:
    """Its units are in another order; and nothing explains a matrix that was trained."""
    source = save_model(tmp_path / "source", "llama")
    target = shutil.copytree(source, tmp_path / "target")
    gate, up, down = of_layers("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", layers=(0,))
    with edit_weights(target) as state:
        half = len(state[gate]) // 2
        for name in (gate, up):
            state[name] = torch.cat(state[name].split([half, len(state[name]) - half])[::-1])
        state[down] = torch.cat(state[down].split([half, state[down].shape[1] - half], 1)[::-1], 1)
    result = growkit.verify(source, target, prompts=1, length=12)
    assert result["kept"]
    assert result["sections"]["diagnosis"] is None
    with edit_weights(target) as state:
        state.update(load_file(source / "model.safetensors"))
        state[gate] *= 1.5
    assert diagnosis_of(source, target) is None
