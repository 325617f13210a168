"""Mistakes of conversions are named, and nothing is said of sound models."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import growkit
from growkit.base.errors import InputError
from growkit.extras.formats.checks.diagnosis import Diagnosis, explain_weights
from growkit.model.checkpoint.format import formats
from growkit.sources import find
from tests.files import edit_config, edit_weights, listed
from tests.models import save_model
from tests.test_program_logits import MODELS, SETTINGS

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
    parts = [state[name].chunk(GROUPS) for name in QKV]
    fused = torch.cat([part for group in zip(*parts, strict=True) for part in group])
    sizes = [len(state[name]) for name in QKV]
    state |= {n: t.clone() for n, t in zip(QKV, fused.split(sizes), strict=True)}


def cut_as_groups(state: State) -> None:
    """A fused matrix with all queries first is cut as if it were in the order of groups."""
    fused = torch.cat([state[name] for name in QKV])
    groups = [
        group.split([len(group) // 2, len(group) // 4, len(group) // 4])
        for group in fused.chunk(GROUPS)
    ]
    state |= {n: torch.cat(t) for n, t in zip(QKV, zip(*groups, strict=True), strict=True)}


def moved_on(*names: str) -> Callable[[State], None]:
    """The tensors of each layer, or expert, are those of the next; the last has the first's."""

    def change(state: State) -> None:
        state |= dict(zip(names, [state[n].clone() for n in (*names[1:], names[0])], strict=True))

    return change


def narrowed(state: State) -> None:
    """Everything is rounded, but stored in the dtype it had."""
    state |= {name: tensor.bfloat16().float() for name, tensor in state.items()}


def tie(state: State) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


def other_heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(HEADS, WIDTH, -1)[[1, 0, 3, 2]].flatten(0, 1)


def experts(matrix: str, layer: int) -> list[str]:
    return of_layers(*(f"block_sparse_moe.experts.{n}.{matrix}" for n in range(4)), layers=(layer,))


QKV = of_layers("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", layers=(1,))
QK = of_layers("self_attn.q_proj", "self_attn.k_proj")
OUTPUT = of_layers("self_attn.o_proj", layers=(1,))
NORMS = of_layers("input_layernorm", layers=(0,))
GATE_AND_UP = of_layers("mlp.gate_proj", "mlp.up_proj", layers=(1,))
KV = exchanged((QK[1], QK[1].replace("k_", "v_")))
MISTAKES: dict[str, tuple[str, Callable[[State], None]]] = {
    "neighbours": ("llama", edited(neighbours, *QK)),
    "halves": ("llama", edited(halves, *QK[:1])),
    "K and V": ("llama", KV),
    "gate and up": ("llama", exchanged(tuple(GATE_AND_UP))),
    "shifted layers": ("llama", exchanged(tuple(of_layers("mlp.down_proj")))),
    "transposed": ("llama", edited(lambda t: t.T, *OUTPUT)),
    "norms + 1": ("gemma3_text", edited(lambda t: t + 1, *NORMS)),
    "norms - 1": ("llama", edited(lambda t: t - 1, *NORMS)),
    "sign": ("llama", edited(torch.neg, *OUTPUT)),
    "tied head": ("llama", tie),
    "rounded": ("llama", edited(lambda t: t.half().float(), *OUTPUT)),
    "rounded to 8 bits": ("llama", edited(lambda t: t.to(torch.float8_e4m3fn).float(), *OUTPUT)),
    "rounded twice": ("llama", edited(lambda t: t.bfloat16().half().float(), *OUTPUT)),
    "K and V, rounded": ("llama", lambda state: (KV(state), narrowed(state))),
    "pairs, rounded": ("llama", lambda state: (edited(neighbours, *QK)(state), narrowed(state))),
    "scaled": ("llama", edited(lambda t: t * WIDTH**-0.5, *QK[::2])),
    "heads": ("llama", edited(other_heads, *QK[::2])),
    "columns": ("llama", edited(lambda t: t.roll(2, 1), *OUTPUT)),
    "tokens": ("llama", edited(lambda t: t.flip(0), "model.embed_tokens.weight")),
    "groups": ("llama", cut_by_groups),
    "no groups": ("llama", cut_as_groups),
    "lost bias": ("qwen2", lambda state: state["model.layers.0.self_attn.v_proj.bias"].zero_()),
    "experts moved on": ("mixtral", moved_on(*experts("w1", 0))),
    "experts": ("mixtral", exchanged(tuple(experts("w2", 1)[::2]))),
    "stacked experts": (
        "granitemoe",
        edited(
            lambda t: torch.cat([t[:2], t[2].roll(24, 0)[None], t[3:]]),
            "model.layers.1.block_sparse_moe.input_linear.weight",
        ),
    ),
}


def diagnosis_of(source: Path, target: Path) -> Diagnosis | None:
    before, after = (find(folder).open() for folder in (source, target))
    return explain_weights(before, after)


FORMS = [*dict.fromkeys(filter(None, ("transformers", *(one.name for one in formats()))))]
"""Formats that growkit writes."""


SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": 2}
SIZES |= {"hidden_size": HEADS * WIDTH, "head_dim": WIDTH}


UNSCALED = {"rope_type": "default", "rope_theta": 500000.0}
"""From so few frequencies, GGUF's reader could not tell how they were scaled."""


def source_of(folder: Path, kind: str, seed: int, **config: Any) -> Path:
    """A tiny model; GGUF adds 1 to a Gemma's norms, which has to be exact."""
    save_model(folder, kind, seed, **{**MODELS.get(kind, {}), **SIZES, **config})
    with edit_weights(folder) as state:
        for name in state if "gemma" in kind else ():
            state[name] = state[name].bfloat16().float()
    return folder


def in_form(folder: Path, form: str) -> Path:
    """A folder in a format; one that cannot hold the model is skipped."""
    if form != "transformers":
        try:
            growkit.convert(folder, folder.with_suffix(".out"), to=form, verify=False)
        except InputError as error:
            pytest.skip(str(error))
        return folder.with_suffix(".out")
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, mistake: str, form: str, seed: int) -> None:
    (kind, change), told = MISTAKES[mistake], listed("diagnosis", "mistakes")[mistake]
    unscaled = {"rope_parameters": UNSCALED} if kind == "llama" else {}
    source = source_of(tmp_path / "source", kind, seed, **unscaled)
    target = shutil.copytree(source, tmp_path / "target")
    assert diagnosis_of(source, in_form(target, form)) is None
    target = shutil.copytree(source, tmp_path / "wrong")
    with edit_weights(target) as state:
        change(state)
    section = diagnosis_of(source, in_form(target, form))
    assert section
    assert told in section.findings[0].sentence
    assert not section.unexplained


def with_noise(change: Callable[[State], None]) -> Callable[[State], None]:
    def both(state: State) -> None:
        change(state)
        for name, tensor in state.items():
            state[name] = tensor + tensor.std() / 100 * torch.randn(tensor.shape)

    return both


def in_few_bits(tensor: torch.Tensor) -> torch.Tensor:
    steps = tensor.abs().amax(1, keepdim=True) / 3
    return (tensor / steps).round() * steps


def without_direction(tensor: torch.Tensor) -> torch.Tensor:
    direction = torch.nn.functional.normalize(torch.randn(len(tensor)), dim=0)
    return tensor - direction[:, None] * (direction @ tensor)


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32)


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:5], 0 * tensor[5:6], tensor[6:]])


ALL = of_layers("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")
ALL += of_layers(*(f"self_attn.{kind}_proj" for kind in "qkvo"))
ALL += of_layers("input_layernorm", "post_attention_layernorm")
NEAR: dict[str, Callable[[State], None]] = {
    "K and V": with_noise(KV),
    "pairs": with_noise(edited(neighbours, *QK)),
    "few bits": edited(in_few_bits, *OUTPUT),
    "direction": edited(without_direction, *OUTPUT),
    "cut off": edited(cut_off, *OUTPUT),
    "a row": edited(one_row, *OUTPUT),
    "columns": edited(
        lambda t: t * torch.linspace(0.2, 3, 16) + torch.randn(t.shape) / 1000, *OUTPUT
    ),
    "added": edited(lambda t: t + 0.3, *OUTPUT),
    "another": edited(torch.randn_like, *OUTPUT),
    "layers": exchanged(*((name, name.replace("s.0.", "s.1.")) for name in ALL if "s.0." in name)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", NEAR)
def test_what_no_mistake_explains_is_described(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    change, told = NEAR[case], listed("diagnosis", "what is near")[case]
    source = source_of(tmp_path / "source", "llama", 0)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        change(state)
    section = diagnosis_of(source, target)
    assert section
    assert told in section.findings[0].sentence


MOVED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "heads": (lambda t: t.roll(16, 0), "has its rows in another order (first, 0 is 48 of"),
    "two heads": (
        lambda t: torch.cat([t[:32], t[48:], t[32:48]]),
        "has its rows in another order (first, 32 is 48 of",
    ),
    "columns": (lambda t: t.roll(16, 1), "has its columns in another order (first, 0 is 48 of"),
    "a row": (
        lambda t: torch.cat([t[:7], 0 * t[7:8], t[8:]]),
        "in 1 row of 64 (first 7), and near",
    ),
    "sign": (torch.neg, "has the other sign, and is multiplied by about 1"),
    "none": (torch.randn_like, "is unrelated to the source's"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", MOVED)
def test_rows_and_columns_are_recognised_through_noise(tmp_path: Path, case: str) -> None:
    change, told = MOVED[case]
    source = source_of(tmp_path / "source", "llama", 0, hidden_size=64, head_dim=16)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        with_noise(edited(change, *OUTPUT))(state)
    section = diagnosis_of(source, target)
    assert section
    assert told in section.findings[0].sentence
    assert "each of the other 20 tensors that differ is about" in section.findings[0].sentence


def test_layers_that_were_left_out_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama", 0, num_hidden_layers=3)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        for name in [name for name in state if ".layers.2." in name]:
            state[name.replace("s.2.", "s.1.")] = state.pop(name)
    edit_config(target, num_hidden_layers=2)
    section = diagnosis_of(source, target)
    assert section
    sentence = "model.layers.1 is the source's 2; the source's model.layers.1 is missing"
    assert section.findings[0].sentence == sentence


def test_a_model_in_another_dtype_is_named_in_one_sentence(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama", 0)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        state |= {name: tensor.bfloat16() for name, tensor in state.items()}
    for pair, end in (((source, target), ""), ((target, source), " in the source")):
        section = diagnosis_of(*pair)
        assert section
        assert section.findings[0].sentence == f"every tensor is rounded to bfloat16{end}"


WRONG = [
    (kind, changes)
    for kind, changes, _ in SETTINGS
    if not any(isinstance(value, list) for value in changes.values())  # of each of more layers
]
WRONG += [("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8})]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_setting_is_named(tmp_path: Path, case: int, form: str, seed: int) -> None:
    kind, changes = WRONG[case]
    source = source_of(tmp_path / "source", kind, seed)
    target = shutil.copytree(source, tmp_path / "wrong")
    edit_config(target, **changes)
    result = growkit.verify(source, in_form(target, form), prompts=1, length=12)
    assert not result["kept"]
    assert any(key in result["reason"] for key in changes)
    assert "no known mistake" not in result["reason"]  # the weights are right


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize(
    ("kind", "name", "row"),
    [("llama", "model.embed_tokens.weight", 321), ("gpt2", "transformer.wpe.weight", 50)],
)
def test_an_embedding_that_no_prompt_uses_is_compared(
    tmp_path: Path, kind: str, name: str, row: int, scale: float
) -> None:
    source = save_model(tmp_path / "source", kind, vocab_size=500)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        state[name][row] *= scale
    result = growkit.verify(source, target, prompts=1, length=12)
    assert result["kept"] is (scale == 1)
    told = f"1 row of {name} (first {row}) is not the source's, although no prompt shows it"
    assert (told in result["reason"]) is not result["kept"]


ERNIE = {"moe_num_experts": 64, "moe_layer_start_index": 1, "moe_layer_end_index": 1}
UNUSED_EXPERTS: dict[str, tuple[str, dict[str, int], str, str]] = {
    "stored alone": ("mixtral", {}, "block_sparse_moe.experts.7.w2.weight", "experts.down_proj"),
    "in a router": ("mixtral", {}, "block_sparse_moe.gate.weight", "gate.weight"),
    "a bias": ("gpt_oss", {}, "mlp.experts.down_proj_bias", "experts.down_proj_bias"),
    "a choice": (
        "ernie4_5_moe",
        ERNIE,
        "mlp.moe_statics.e_score_correction_bias",
        "gate.moe_statics.e_score_correction_bias",
    ),
}
"""The numbers of one of 64 experts: the tensor that is stored, and the parameter."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", [1.0, 0.99])
@pytest.mark.parametrize("case", UNUSED_EXPERTS)
def test_an_expert_that_no_prompt_uses_is_compared(tmp_path: Path, case: str, scale: float) -> None:
    kind, sizes, stored, name = UNUSED_EXPERTS[case]
    source = save_model(tmp_path / "source", kind, **(sizes or {"num_local_experts": 64}))
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        tensor = state[f"model.layers.1.{stored}"]
        (tensor if "experts.7" in stored else tensor.view(64, -1)[7]).mul_(scale)
    result = growkit.verify(source, target, prompts=1, length=4)
    assert result["kept"] is (scale == 1)
    told = f"1 expert of model.layers.1.mlp.{name} (first 7) is not the source's"
    assert (told in result["reason"]) is not result["kept"]


@pytest.mark.parametrize("kept", [True, False])
def test_experts_may_be_in_another_order_with_their_router(tmp_path: Path, kept: bool) -> None:
    source = save_model(tmp_path / "source", "gpt_oss", num_local_experts=8)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as state:
        for name in state:
            if ".experts." in name or (".router." in name and kept):
                state[name] = state[name][[1, 0, *range(2, 8)]].contiguous()
    assert growkit.verify(source, target, prompts=1, length=4)["kept"] is kept


def test_padding_and_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama", 0)
    target = shutil.copytree(source, tmp_path / "target")
    padded = ["model.embed_tokens.weight", "lm_head.weight"]
    with edit_weights(target) as state:
        edited(lambda t: torch.cat([t, torch.zeros(8, t.shape[1])]), *padded)(state)
        tokens = len(state[padded[0]])
    edit_config(target, vocab_size=tokens)
    assert growkit.verify(source, target, prompts=1, length=12)["kept"]
    with edit_weights(target) as state:
        KV(state)
    result = growkit.verify(source, target, prompts=1, length=12)
    assert not result["kept"]
    assert "self_attn.k_proj.weight of layer 0 holds self_attn.v_proj.weight" in result["reason"]
    assert f"the vocabulary has {tokens} tokens in place of {tokens - 8}" in result["reason"]
    target = shutil.copytree(source, tmp_path / "shallow")
    with edit_weights(target) as state:
        for name in [name for name in state if ".layers.1." in name]:
            del state[name]
    edit_config(target, num_hidden_layers=1)
    reason = growkit.verify(source, target, prompts=1, length=12)["reason"]
    assert "the target lacks 9 tensors (model.layers.1.input_layernorm.weight" in reason


def test_a_model_that_computes_the_same_has_no_diagnosis(tmp_path: Path) -> None:
    """Its units are in another order; of a matrix that was trained, the distance is told."""
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
        state[gate] += torch.randn(state[gate].shape) / 50
    section = diagnosis_of(source, target)
    assert section
    assert (section.explanations, section.unexplained) == ([], [gate])
    assert "gate_proj.weight of layer 0 is about" in section.findings[0].sentence
