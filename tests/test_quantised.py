"""Quantised folders, made by the libraries that define the formats, read as dense models.

What transformers dequantises on a CPU judges every bit.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    Mxfp4Config,
    PreTrainedConfig,
    Qwen3Config,
)

import growkit
from growkit.checkpoint.dequantising import Dequantised, Format
from growkit.engine.class_weights import class_weights
from growkit.sources import find
from tests.conftest import cli, edit_json, edit_weights, relative_error, save_random, seeded

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = DeepseekV3Config(
    **SIZES | EXPERTS | {"num_key_value_heads": 4},
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
Quantise = Callable[[str, Tensor], dict[str, Tensor]]


def save(folder: Path, config: PreTrainedConfig, quantise: Quantise, **settings: Any) -> Path:
    """A folder of a random model, some of whose tensors are replaced by quantised ones."""
    save_random(folder, config, dtype=torch.bfloat16)
    with edit_weights(folder) as tensors:
        for name, tensor in list(tensors.items()):
            del tensors[name]
            tensors |= quantise(name, tensor)
    with edit_json(folder / "config.json") as content:
        content["quantization_config"] = settings
    return folder


def mxfp4(folder: Path) -> Path:
    """Any bytes are numbers; scales are those of trained models, roughly."""
    random = torch.Generator().manual_seed(0)

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        return {
            f"{name}_blocks": torch.randint(256, (*shape, 16), generator=random).byte(),
            f"{name}_scales": torch.randint(118, 124, shape, generator=random).byte(),
        }

    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return save(folder, config, quantise, quant_method="mxfp4")


def fp8(folder: Path, config: PreTrainedConfig, block: int = 16, **settings: Any) -> Path:
    """As transformers quantises while it saves."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    how = SimpleNamespace(weight_block_size=[block, block], scale_fmt=settings.get("scale_fmt"))
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=how))

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        plain = tensor.dim() < 2 or any(part in name for part in ("embed", "lm_head", "gate.w"))
        return {name: tensor} if plain else quantiser.convert({name: tensor})

    settings |= {"quant_method": "fp8", "weight_block_size": [block, block]}
    return save(folder, config, quantise, **settings)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "mxfp4": mxfp4,
    "deepseek": lambda folder: fp8(folder, DEEPSEEK),
    "qwen3": lambda folder: fp8(folder, Qwen3Config(**SIZES)),
    "ue8m0": lambda folder: fp8(folder, Qwen3Config(**SIZES), 32, scale_fmt="ue8m0"),
}
OPTIONS = {
    "mxfp4": Mxfp4Config(dequantize=True),
    **dict.fromkeys(("deepseek", "qwen3", "ue8m0"), FineGrainedFP8Config(dequantize=True)),
}


@pytest.fixture(scope="module", params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[kind](tmp_path_factory.mktemp(kind) / "source")


@pytest.fixture(scope="module")
def dense(kind: str, source: Path) -> torch.nn.Module:
    """The model as transformers dequantises it."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, quantization_config=OPTIONS[kind])
    return model.to(torch.bfloat16)


def test_every_bit_is_as_transformers_has_it(source: Path, dense: torch.nn.Module) -> None:
    checkpoint = find(source).open()
    assert isinstance(checkpoint, Dequantised)
    assert not checkpoint.config.keys() & {"quantization_config"}
    ours = class_weights(checkpoint)
    for name, parameter in dense.named_parameters():
        assert ours.read(name).to(parameter.dtype).equal(parameter), name


def test_any_part_is_a_part_of_the_whole(source: Path) -> None:
    choose = seeded(1)
    checkpoint = find(source).open()
    assert isinstance(checkpoint, Dequantised)
    for name in checkpoint.parts:
        whole = checkpoint.read(name)
        assert torch.cat(list(checkpoint.blocks(name))).equal(whole)
        ends = [sorted(choose.choices(range(size + 1), k=2)) for size in whole.shape]
        where = tuple(slice(*each) for each in ends)
        assert checkpoint.read(name, *where).equal(whole[where]), (name, where)


def test_it_is_grown_and_proved(source: Path, dense: Any, tmp_path: Path) -> None:
    """Against what transformers saves of the dense model; nothing of quantisation is left."""
    dense.save_pretrained(tmp_path / "dense")
    result = growkit.grow(source, tmp_path / "out", hidden="x2")
    assert result["kept"], result["verification"]["reason"]
    assert "quantised with" in result["warnings"][0]
    assert "dequantises the source to the same bits" in result["verification"]["reason"]
    assert "quantiz" not in (tmp_path / "out" / "config.json").read_text()
    assert relative_error(tmp_path / "dense", tmp_path / "out") < 1e-12
    assert growkit.verify(source, tmp_path / "out")["kept"]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS["qwen3"](tmp_path_factory.mktemp("qwen3") / "source")


def test_a_fault_of_ours_is_caught(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale of one tensor, in source and target alike: only transformers can tell."""
    from growkit.checkpoint.quantised.fp8 import Fp8

    rows = Fp8.rows

    def wrong(self: Format, parts: Any, *rest: Any) -> Tensor:
        return rows(self, parts, *rest) * (1 + ("1.mlp.up_proj" in parts.name))

    monkeypatch.setattr(Fp8, "rows", wrong)
    result = growkit.grow(qwen3, tmp_path / "out", hidden="x2")
    assert not result["kept"]
    finding = next(f for f in result["verification"]["findings"] if f["kept"] is False)
    assert finding["name"] == "dequantised"
    assert finding["place"] == "model.layers.1.mlp.up_proj.weight"


def test_convert_only_dequantises(qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = cli("convert", qwen3, out, "--to", "dense-weights")
    assert said.exit_code == 0, said.output
    again = cli("convert", out, tmp_path / "again", "--to", "dense-weights")
    assert again.exit_code == 2
    assert "is dense already" in again.output
    theirs: Any = AutoModelForCausalLM.from_pretrained(qwen3, quantization_config=OPTIONS["qwen3"])
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == {*dict(theirs.named_parameters())}
    assert all(ours[name].equal(each) for name, each in theirs.named_parameters())
    assert "quantised" in cli("inspect", qwen3).output
    refused = cli("verify", out, qwen3)
    assert refused.exit_code == 2
    assert "dequantise it first" in refused.output


def test_blocks_at_the_edge_are_cut_off(tmp_path: Path) -> None:
    """As in DeepSeek-V3, whose 576 rows are no multiple of 128; transformers refuses these."""
    block = 48
    source = fp8(tmp_path / "source", Qwen3Config(**SIZES), 16)
    name = "model.layers.0.mlp.up_proj.weight"
    with edit_weights(source) as tensors:
        for each in [each for each in tensors if each.endswith("_scale_inv")]:
            shape = tensors[each.removesuffix("_scale_inv")].shape
            tensors[each] = torch.rand([-(-size // block) for size in shape]) + 0.5
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(block, 0)
        scales = scales.repeat_interleave(block, 1)[:64, :64]
        expected = (tensors[name].float() * scales).bfloat16()
    with edit_json(source / "config.json") as config:
        config["quantization_config"]["weight_block_size"] = [block, block]
    assert find(source).open().read(name).equal(expected)
