"""Quantised folders, made by the libraries that define the formats, read as dense models.

What transformers dequantises on a CPU judges every bit; of formats that it needs other libraries
for, what these have dequantised (``tests/quantised.py``).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
    PreTrainedConfig,
    Qwen3Config,
)

import growkit
from growkit.base.errors import InputError
from growkit.engine.class_weights import class_weights
from growkit.extras.formats.dequantising import Dequantised, Scheme
from growkit.sources import find
from tests.commands import cli
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import relative_error, save_random, seeded
from tests.quantised import NAME, cases, quantise
from tests.test_multimodal import save_whole

QUICK = growkit.Settings(prompts=1, length=8)
WEIGHTS = "model.safetensors"
SIZES: dict[str, Any] = listed("quantised", "sizes")
DEEPSEEK = DeepseekV3Config(**SIZES | listed("quantised", "sizes of DeepSeek-V3"))
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


@pytest.mark.sampled(1)
def test_it_is_grown_and_proved(source: Path, dense: Any, tmp_path: Path) -> None:
    """Against what transformers saves of the dense model; nothing of quantisation is left."""
    dense.save_pretrained(tmp_path / "dense")
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    assert "quantised with" in result["warnings"][0]
    assert "dequantises the source to the same bits" in result["verification"]["reason"]
    assert "quantiz" not in (tmp_path / "out" / "config.json").read_text()
    assert relative_error(tmp_path / "dense", tmp_path / "out") < 1e-12
    assert growkit.verify(source, tmp_path / "out", QUICK)["kept"]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS["qwen3"](tmp_path_factory.mktemp("qwen3") / "source")


def test_a_fault_of_ours_is_caught(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale of one tensor, in source and target alike: only transformers can tell."""
    from growkit.extras.formats.quantised.fp8 import Fp8

    rows = Fp8.rows

    def wrong(self: Scheme, parts: Any, *rest: Any) -> Tensor:
        return rows(self, parts, *rest) * (1 + ("1.mlp.up_proj" in parts.name))

    monkeypatch.setattr(Fp8, "rows", wrong)
    result = growkit.grow(qwen3, tmp_path / "out", hidden="x2", verify=QUICK)
    assert not result["kept"]
    finding = next(f for f in result["verification"].findings if f["kept"] is False)
    assert finding["name"] == "dequantised"
    assert finding["place"] == "model.layers.1.mlp.up_proj.weight"


def test_convert_only_dequantises(qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = cli("convert", qwen3, out, "--to", "dense-weights")
    assert said.exit_code == 0, said.output
    again = cli("convert", out, tmp_path / "again", "--to", "dense-weights")
    assert again.exit_code == 2
    assert "is already dense" in again.output
    theirs: Any = AutoModelForCausalLM.from_pretrained(qwen3, quantization_config=OPTIONS["qwen3"])
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == {*dict(theirs.named_parameters())}
    assert all(ours[name].equal(each) for name, each in theirs.named_parameters())
    assert "quantised" in cli("inspect", qwen3).output
    bare = shutil.copytree(qwen3, tmp_path / "bare")
    shutil.copy(out / "config.json", bare)
    lacking = cli("convert", bare, tmp_path / "again", "--to", "dense-weights")
    assert lacking.exit_code == 2
    assert "lacks its quantization_config" in " ".join(lacking.output.split())
    same = cli("verify", out, qwen3, "--prompts", 1, "--length", 8)
    assert same.exit_code == 0, same.output
    assert "with the quantised weights themselves round further" in " ".join(same.output.split())


def exchange(state: dict[str, Tensor], one: str, other: str) -> None:
    for suffix in ("weight", "weight_scale_inv"):
        names = [f"model.layers.1.{name}.{suffix}" for name in (one, other)]
        state |= {names[0]: state[names[1]], names[1]: state[names[0]]}


SCALES = "model.layers.1.self_attn.o_proj.weight_scale_inv"
FAULTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "none": lambda state: None,
    "inverted": lambda state: state.update({SCALES: 1 / state[SCALES]}),
    "too large": lambda state: state.update({SCALES: state[SCALES] * 1.25}),
    "lost in part": lambda state: state[SCALES][:1].fill_(0.5),
    "exchanged": lambda state: exchange(state, "mlp.gate_proj", "mlp.up_proj"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_target_in_blocks_is_told_from_one_with_a_fault(fault: str, tmp_path: Path) -> None:
    edit, told = FAULTS[fault], listed("quantised", "faults")[fault]
    source = save_random(tmp_path / "source", Qwen3Config(**SIZES), dtype=torch.bfloat16)
    target = MAKERS["qwen3"](tmp_path / "target")
    with edit_weights(target) as state:
        edit(state)
    result = growkit.verify(source, target, QUICK, max_kl=10.0)
    assert result["kept"] is (fault == "none"), result["reason"]
    assert told in growkit.verify(source, target, QUICK)["reason"]


@pytest.mark.parametrize("case", sorted(cases()))
def test_every_bit_is_as_the_library_has_it(case: str, tmp_path: Path) -> None:
    settings, stored, expected = cases()[case]
    folder = with_tensors(tmp_path / case, {f"m{key}": each for key, each in stored.items()})
    edit_config(folder, quantization_config=settings)
    checkpoint = find(folder).open()
    found = checkpoint.read(NAME)
    assert found.dtype == expected.dtype
    assert found.equal(expected)
    assert set(checkpoint.tensors) == {NAME, "plain"}
    for rows in (slice(3, 8), slice(15, 32)):  # no bounds of blocks or words
        assert checkpoint.read(NAME, rows, slice(5, 9)).equal(expected[rows, 5:9])


@pytest.mark.parametrize("shuffled", [False, True])
def test_columns_may_be_out_of_order(shuffled: bool, tmp_path: Path) -> None:
    """As compressed-tensors stores act-order: the group of every column, or -1 throughout."""
    settings, stored, expected = cases()["int4"]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(64) // 32
    if shuffled:  # the columns of another matrix, which takes them back
        words = stored[".weight_packed"]
        numbers = torch.stack([words >> place & 15 for place in range(0, 32, 4)], -1).flatten(1)
        numbers, expected, groups = numbers[:, order], expected[:, order], groups[order]
        packed = [numbers[:, place::8] << 4 * place for place in range(8)]
        stored[".weight_packed"] = torch.stack(packed).sum(0).int()
    stored[".weight_g_idx"] = (groups if shuffled else torch.full((64,), -1)).int()
    folder = with_tensors(tmp_path / "m", {f"m{key}": each for key, each in stored.items()})
    edit_config(folder, quantization_config=settings)
    checkpoint = find(folder).open()
    assert checkpoint.read(NAME).equal(expected)
    assert checkpoint.read(NAME, slice(3, 8), slice(5, 9)).equal(expected[3:8, 5:9])
    assert set(checkpoint.tensors) == {NAME, "plain"}


@pytest.mark.parametrize("case", ["nf4", "llm-int8", "fp8"])
def test_older_settings_do_not_name_the_method(case: str, tmp_path: Path) -> None:
    """What transformers reads without it, as well."""
    settings, stored, expected = cases()[case]
    folder = with_tensors(tmp_path / case, {f"m{key}": each for key, each in stored.items()})
    del settings["quant_method"]
    edit_config(folder, quantization_config=settings)
    assert find(folder).open().read(NAME).equal(expected)


def with_tensors(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    plain = {"plain": torch.ones(2, dtype=torch.bfloat16)}
    save_file({k: v.contiguous() for k, v in (tensors | plain).items()}, folder / WEIGHTS)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    return folder


def gptq(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What would be stored of a matrix of this shape: any bits are numbers."""
    if tensor.dim() < 2 or "embed" in name or "lm_head" in name:
        return {name: tensor}
    random, (rows, columns) = torch.Generator().manual_seed(0), tensor.shape
    stem, groups = name.removesuffix(".weight"), columns // 16
    words = [
        torch.randint(-(2**31), 2**31, shape, generator=random).int()
        for shape in ((columns // 8, rows), (groups, rows // 8))
    ]
    return {
        f"{stem}.qweight": words[0],
        f"{stem}.qzeros": words[1],
        f"{stem}.scales": torch.rand((groups, rows), generator=random).add(0.5).mul(0.02).half(),
        f"{stem}.g_idx": torch.arange(columns).int() // 16,
    }


def test_what_growkit_alone_reads_is_said(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4}
    source = save(tmp_path / "source", LlamaConfig(**SIZES), gptq, **settings)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", heads="x2", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    assert "only growkit dequantised the source" in result["verification"]["reason"]
    checkpoint = find(source).open()
    dense = shutil.copytree(source, tmp_path / "dense")
    save_file({name: checkpoint.read(name) for name in checkpoint.tensors}, dense / WEIGHTS)
    (dense / "config.json").write_text(json.dumps(checkpoint.config))
    assert relative_error(dense, tmp_path / "out") < 1e-12


@pytest.mark.parametrize(
    ("case", "settings", "stored", "says"),
    [
        *((*each[:2], {}, each[2]) for each in listed("quantised", "settings that are not read")),
        ("gptq-4", {}, {".qzeros": None}, "suffix .qzeros is missing"),
        ("gptq-4", {}, {".g_idx": torch.full((64,), 2).int()}, "g_idx and 2 groups do not fit"),
        ("gptq-4", {}, {".scales": torch.ones(2, 31).half()}, r"shape \[2, 31\] and dtype F16"),
        ("int4", {}, {".weight_shape": torch.tensor([32, 640])}, "words for 640 columns"),
        ("int4", {}, {".weight_g_idx": torch.full((64,), 2).int()}, "weight_g_idx and 2 groups"),
        ("fp8", {}, {".weight_scale": torch.ones(3, 5)}, "no|do not fit together"),
        ("fp8", {}, {".weight_scale": torch.tensor([torch.inf])}, "NaN or infinity"),
        ("fp8", {}, {"2.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "m2.weight .* missing"),
        ("nf4", {}, {".weight.quant_state.bitsandbytes__nf4": torch.zeros(9).byte()}, "its state"),
        (
            "nf4",
            {},
            {".weight.quant_state.bitsandbytes__nf4": torch.zeros(1, 9).byte()},
            r"shape \[1, 9\]",
        ),
        ("nf4", {}, {".weight": torch.zeros(9, 1).byte()}, r"\[1024, 1\] and U8 were expected"),
        ("llm-int8", {}, {".weight_format": torch.tensor(1).byte()}, "weight_format and rows"),
    ],
)
def test_what_is_not_read_is_one_sentence(
    case: str, settings: Any, stored: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    known, tensors, _ = cases()[case]
    kept = {f"m{k}": v for k, v in (tensors | stored).items() if v is not None}
    folder = with_tensors(tmp_path / "source", kept)
    edit_config(folder, quantization_config=known | settings)
    with pytest.raises(InputError, match=says):
        find(folder).open().read(NAME)


def test_groups_of_modules_may_have_other_formats(tmp_path: Path) -> None:
    (four, packed, wanted), (eight, plain, also) = cases()["int4"], cases()["fp8"]
    groups = {
        "four": four["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "eight": eight["config_groups"]["group_0"] | {"format": "float-quantized"},
    }
    stored = {f"m{k}": v for k, v in packed.items()} | {f"other{k}": v for k, v in plain.items()}
    folder = with_tensors(tmp_path / "source", stored)
    settings = four | {"format": "mixed-precision", "config_groups": groups}
    edit_config(folder, quantization_config=settings)
    checkpoint = find(folder).open()
    assert checkpoint.read(NAME).equal(wanted)
    assert checkpoint.read("other.weight").equal(also)


@pytest.mark.parametrize("settings", ["whole", "text_config"])
def test_a_language_model_inside_another(settings: str, tmp_path: Path) -> None:
    """It is dequantised as well; a proof does not ask transformers about a part of a model."""
    source = quantise(save_whole(tmp_path / "source", "mistral3", torch.bfloat16))
    with edit_json(source / "config.json") as config:
        if settings == "text_config":  # as in Kimi K2.5
            config["text_config"]["quantization_config"] = config.pop("quantization_config")
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    theirs: Any = AutoModelForMultimodalLM.from_pretrained(source, **options)
    ours = find(source).open()
    for name, parameter in theirs.model.language_model.named_parameters():
        assert ours.read(f"model.{name}").equal(parameter), name
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
    assert result["kept"]
    assert "only its language model" in result["warnings"][0]
    assert "quantised with FP8" in result["warnings"][1]
    assert "only growkit dequantised the source" in result["verification"]["reason"]
    assert "quantiz" not in (tmp_path / "out" / "config.json").read_text()


def test_its_family_may_be_inferred(tmp_path: Path) -> None:
    source = quantise(save_random(tmp_path / "source", ArceeConfig(**SIZES), dtype=torch.bfloat16))
    result = growkit.grow(source, tmp_path / "out", ffn="x2", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 has one behind its last layer, which its class in transformers passes over."""
    source = fp8(tmp_path / "source", DEEPSEEK)
    with edit_weights(source) as tensors:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()
        others = {"mtp.norm.weight", "model.mtp_emb_norm.0.weight"}  # of Qwen, and of ERNIE
        tensors |= {name: torch.ones(64) for name in others}
    edit_config(source, num_nextn_predict_layers=1)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    assert "to the same bits" in result["verification"]["reason"]
    assert {name for name in result["dropped"] if ".layers.2." not in name} == others
    edit_config(source, num_nextn_predict_layers=0)
    with pytest.raises(InputError, match=r"layers\.2.* is not part of"):
        growkit.grow(source, tmp_path / "out", hidden="x2", overwrite=True)


def test_blocks_at_the_edge_are_cut_off(tmp_path: Path) -> None:
    """As in DeepSeek-V3, whose 576 rows are no multiple of 128.

    transformers refuses these, or takes all blocks to be smaller if their number divides the rows.
    """
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
    result = growkit.grow(source, tmp_path / "out", ffn="x2", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    assert "transformers does not cut blocks off" in result["verification"]["reason"]
