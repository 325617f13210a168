"""Models in the formats of other programs are read as those that they were made of."""

import json
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint.format import formats
from growkit.sources import find
from tests.commands import cli
from tests.converted import (
    BLOCKS,
    EXPERTS,
    FILES,
    MODELS,
    TYPES,
    save_source,
)
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import relative_error, save_model

UP = "model.layers.0.mlp.up_proj.weight"
QUICK = growkit.Settings(prompts=2, length=16)
GEMMA = {
    **dict.fromkeys(("norm_qk", "post_attention_norm", "post_mlp_norm"), False),
    "rope_local_base_freq": None,
}
"""Settings of litgpt that make a Gemma 3 a Gemma."""


CONVERTED = [
    *product(MODELS, ("gguf", "litgpt", "mlx")),
    *((kind, program) for program, kinds in TYPES.items() for kind in kinds),
]


def tensor_bytes(source: Path, name: str) -> bytes:
    return load_file(source / "model.safetensors")[name].view(torch.int16).numpy().tobytes()


def setting(key: str, form: str, value: object) -> Callable[..., bytes]:
    """Write another value of a setting that has a fixed size."""

    def edit(content: bytes, *source: Path) -> bytes:
        begin = content.index(key.encode()) + len(key) + 4
        number = struct.pack(f"<{form}", value)
        return content[:begin] + number + content[begin + len(number) :]

    return edit


def of_distributed(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What torch.distributed.checkpoint lists in a folder, and the tensors among it."""
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    entries = {name: getattr(entry, "size", None) for name, entry in listed.items()}
    state = {
        name: torch.zeros(size, dtype=torch.bfloat16) for name, size in entries.items() if size
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return entries, state


def stored(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and settings of a converted model, as the libraries of its format read them."""
    if (path / ".metadata").is_file():
        return of_distributed(path)[1], {}
    for archive in filter(zipfile.is_zipfile, path.glob("*") if path.is_dir() else ()):
        assert zipfile.ZipFile(archive).testzip() is None
    if (path / "lit_model.pth").is_file():
        settings = yaml.safe_load((path / "model_config.yaml").read_text())
        return torch.load(path / "lit_model.pth"), settings
    if (path / "model-00001-of-00001.bin").is_file():
        return torch.load(path / "model-00001-of-00001.bin"), {}
    if (path / "model.safetensors").is_file():
        return load_file(path / "model.safetensors"), {}
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path / "model.gguf" if path.is_dir() else path)
    tensors = {
        one.name: torch.tensor([one.tensor_type, *one.data.tobytes()]) for one in reader.tensors
    }
    return tensors, {name: one.contents() for name, one in reader.fields.items()}


ALIASES = {"decoder.layers.pre_mlp_layernorm.weight"}
"""Names of tensors that Megatron-Core expects with Transformer Engine, and otherwise others."""

ABOUT = re.compile(r"GGUF\.|general\.(type|name|size_label|file_type)|hf_config|name$|padding")
"""Settings that say where a model is from, or count others."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "program"), CONVERTED)
def test_growkit_reads_and_writes_what_the_program_itself_writes(
    tmp_path: Path, kind: str, program: str
) -> None:
    """llama.cpp permutes rotary rows and adds one to norms, litgpt joins QKV, mlx-lm experts.

    But for the last bits of the rotary factors, which llama.cpp's script computes in float32.
    """
    source, out = save_source(tmp_path / "source", kind), tmp_path / "out"
    result = growkit.verify(source, FILES / f"{kind}.{program}", QUICK)
    assert result["verdict"] == "preserved"
    unknown = result["sections"]["files"]["unknown_files"]
    assert {*unknown} <= {"model.safetensors.index.json"}  # mlx-lm writes one for a single file
    weights, logits = (result["sections"][name] for name in ("weights", "logits"))
    assert weights["tensors_recovered"] == weights["source_tensors"] >= 20
    assert logits["strict_float64"]["relative"] == 0
    growkit.convert(source, out, program, verify=False)
    (tensors, settings), (expected, known) = stored(out), stored(FILES / f"{kind}.{program}")
    assert tensors.keys() - ALIASES == expected.keys()
    assert {k for k in expected if not tensors[k].equal(expected[k])} <= {"rope_freqs.weight"}
    alike = [key for key in settings.keys() & known.keys() if not ABOUT.match(key)]
    assert len(alike) > 12 or not settings
    assert {key: settings[key] for key in alike} == {key: known[key] for key in alike}


@pytest.mark.sampled(2, "llama-gguf-mlx")
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [(kind, *pair) for kind in MODELS for pair in permutations(("gguf", "litgpt", "mlx"), 2)],
)
def test_files_of_two_programs_are_the_same_model(kind: str, first: str, second: str) -> None:
    """None of them has all settings of the other, nor a file that only transformers has."""
    result = growkit.verify(FILES / f"{kind}.{first}", FILES / f"{kind}.{second}", QUICK)
    assert result["verdict"] == "preserved", result["reason"]
    assert result["sections"]["weights"]["tensors_recovered"] >= 20


@pytest.mark.sampled(1, "mlx-gguf")
@pytest.mark.parametrize(
    ("first", "second"), permutations(("gguf", "litgpt", "mlx", "torchtitan", "torchtune"), 2)
)
def test_conversions_of_one_model_are_the_same_model(
    first: str, second: str, tmp_path: Path
) -> None:
    """None is made from the other, whatever their manifests say; one wrong weight shows."""
    source, paths = save_source(tmp_path / "source", "llama"), (tmp_path / "a", tmp_path / "b")
    for path, name in zip(paths, (first, second), strict=True):
        growkit.convert(source, path, name, verify=False)
    result = growkit.verify(*paths, QUICK)
    assert result["verdict"] == "preserved", result["reason"]
    with edit_weights(source) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    growkit.convert(source, paths[1], second, verify=False, overwrite=True)
    assert growkit.verify(*paths, QUICK)["verdict"] == "not preserved"


NOT_USUAL: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 4},
    "gemma3_text": {"query_pre_attn_scalar": 4},
}
"""What formats take for granted."""

ALL_TYPES = [(one.name, kind) for one in formats() if one.name for kind in one.models]


@pytest.mark.sampled(2, "gguf-qwen3_moe")
@pytest.mark.parametrize(("program", "kind"), ALL_TYPES)
def test_every_type_that_a_format_names_is_written_and_read(
    tmp_path: Path, program: str, kind: str
) -> None:
    changes = {"num_key_value_heads": 2, **NOT_USUAL.get(kind, {})}
    source = save_model(tmp_path / "source", kind, dtype=torch.bfloat16, **changes)
    assert growkit.convert(source, tmp_path / "out", program, verify=QUICK)["kept"]


def test_sizes_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama")
    with pytest.raises(InputError, match="read with other sizes"):
        growkit.convert(source, tmp_path / "out", "meta")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_qk": False}, "rope_local_base_freq is known with norm_qk alone"),
        (GEMMA, "has no window"),
        ({**GEMMA, "sliding_window_size": None, "final_logit_softcapping": 30.0}, "_softcapping"),
        ({**GEMMA, "sliding_window_size": None, "attention_scores_scalar": 3}, "_scalar is 3"),
    ],
)
def test_a_setting_that_a_gemma_does_not_have_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = shutil.copytree(FILES / "gemma3_text.litgpt", tmp_path / "model")
    file = folder / "model_config.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))
    with pytest.raises(InputError, match=reason):
        growkit.inspect(folder)


@pytest.mark.parametrize("kind", MODELS)
def test_settings_that_an_earlier_litgpt_does_not_write(tmp_path: Path, kind: str) -> None:
    """What is null or false goes without saying."""
    folder = shutil.copytree(FILES / f"{kind}.litgpt", tmp_path / "model")
    file, expected = folder / "model_config.yaml", find(folder).open().config
    settings = yaml.safe_load(file.read_text())
    said = {key: value for key, value in settings.items() if value not in (None, False)}
    file.write_text(yaml.safe_dump(said))
    assert len(said) < len(settings)
    assert find(folder).open().config == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gemma3_text.gguf", "mixtral.litgpt", "mixtral.mlx"])
def test_a_converted_model_is_a_source(tmp_path: Path, name: str) -> None:
    source = save_source(tmp_path / "source", name.partition(".")[0])
    growkit.grow(FILES / name, tmp_path / "out", hidden="x4", verify=False)
    assert relative_error(source, tmp_path / "out") < 1e-12


QWEN3 = "model.layers.1.self_attn."
FAULTS: dict[str, tuple[str, Callable[[bytes, Path], bytes], str]] = {
    "K and V exchanged": (
        "qwen3",
        lambda content, source: content.replace(
            tensor_bytes(source, f"{QWEN3}k_proj.weight"),
            tensor_bytes(source, f"{QWEN3}v_proj.weight"),
        ),
        f"{QWEN3}k_proj.weight",
    ),
    "a row that no prompt has": (
        "qwen3",
        lambda content, source: content.replace(
            tensor_bytes(source, "model.embed_tokens.weight")[: 2 * 16], bytes(2 * 16)
        ),
        "model.embed_tokens.weight does not yield",
    ),
    "another eps": ("llama", setting("layer_norm_rms_epsilon", "f", 1e-5), "rms_norm_eps"),
    "another base": ("mixtral", setting("rope.freq_base", "f", 2e4), "rope_parameters"),
    "window": ("gemma3_text", setting("attention.sliding_window", "I", 5), "sliding_window"),
    "base": ("gemma3_text", setting("rope.freq_base_swa", "f", 2e4), "rope_parameters"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_conversion_is_found_and_named(tmp_path: Path, fault: str) -> None:
    kind, edit, name = FAULTS[fault]
    source, file = save_source(tmp_path / "source", kind), tmp_path / "wrong.gguf"
    content = (FILES / f"{kind}.gguf").read_bytes()
    file.write_bytes(edit(content, source))
    assert file.read_bytes() != content
    result = growkit.verify(source, file, QUICK)
    assert result["verdict"] == "not preserved"
    assert name in result["reason"]
    weights = result["sections"]["weights"]["findings"][0]
    assert "growkit.json" not in str(weights["advice"])


def test_a_quantised_file_stands_for_the_numbers_of_its_blocks(tmp_path: Path) -> None:
    """The library of the format quantises and dequantises; growkit reads parts of rows."""
    gguf = pytest.importorskip("gguf")
    numbers = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(numbers, kind)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", numbers[0])
    for write in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write}")()
    writer.close()
    from growkit.extras.formats.weight_formats.gguf import FORMAT
    from growkit.model.checkpoint.folder import Folder

    (file,) = FORMAT.open(Folder(tmp_path / "q.gguf"), ["q.gguf"])
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert file.tensors["token_embd.weight"].shape == (6, 96)
    assert file.read("token_embd.weight", slice(1, 5), slice(7, 70)).equal(expected[1:5, 7:70])
    empty = (tmp_path / "q.gguf").read_bytes().replace(*(struct.pack("<QQ", 96, n) for n in (6, 0)))
    (tmp_path / "q.gguf").write_bytes(empty)
    with pytest.raises(InputError, match="not a multiple of a block"):
        FORMAT.open(Folder(tmp_path / "q.gguf"), ["q.gguf"])


@pytest.mark.sampled(2, "-")
@pytest.mark.parametrize(
    ("fault", "factor"),
    [("", 1), (UP, -1), (UP.replace("up", "gate"), 1.04), ("model.norm.weight", -1)],
)
def test_rounding_to_blocks_is_told_from_a_fault(tmp_path: Path, fault: str, factor: float) -> None:
    """llama.cpp made the file; a norm is not rounded, and a matrix only a little, to both sides."""
    pytest.importorskip("gguf")
    source = save_source(tmp_path / "source", "llama", BLOCKS)
    shutil.copy(FILES / "llama.q4_k_m", tmp_path / "model.gguf")
    if fault:
        with edit_weights(source) as state:
            state[fault][slice(None) if factor > 0 else 3] *= factor
    result = growkit.verify(source, tmp_path / "model.gguf", QUICK)
    assert result["verdict"] == "not preserved"
    told = "8 weights are rounded to blocks of few bits, at most 6.2e-02" in result["reason"]
    assert told is not bool(fault)
    assert (result["sections"]["weights"]["first_lost_tensor"] or "") == fault
    assert result["sections"]["logits"]["strict_float64"]["kl_nats_per_token"] > 0
    for most in (1e-6, 1.0) if fault != UP else ():
        limited = growkit.verify(source, tmp_path / "model.gguf", replace(QUICK, max_kl=most))
        allowed = most == 1.0 and not fault
        assert (limited["kept"], limited["verdict"] == "within the limit") == (allowed, allowed)


@pytest.mark.parametrize(("kind", "sizes", "read"), listed("formats", "mlx settings"))
def test_mlx_reads_the_settings(
    kind: str, sizes: dict[str, Any], read: dict[str, Any] | None, tmp_path: Path
) -> None:
    """By earlier names than transformers', without which mlx-lm computes with its defaults."""
    source = save_source(tmp_path / "s", kind, sizes)
    if read is None:
        with pytest.raises(growkit.InputError, match="every n-th layer"):
            growkit.convert(source, tmp_path / "out", "mlx", verify=False)
        return
    out = tmp_path / "out"
    assert growkit.convert(source, out, "mlx", verify=QUICK)["kept"]
    written = json.loads((out / "config.json").read_text("utf-8"))
    assert written | read == written
    assert not read.items() <= json.loads((source / "config.json").read_text("utf-8")).items()
    for unknown_origin in (False, True):
        if unknown_origin:
            (out / "growkit.json").unlink()
        result = growkit.verify(source, out, QUICK)
        assert result["kept"]
        assert "mlx-lm" not in result["reason"]
        with edit_json(out / "config.json") as config:
            config["rope_theta"] *= 2  # the class reads rope_parameters
        assert not growkit.verify(source, out, QUICK)["kept"]
        (out / "config.json").write_text(json.dumps(written))


def test_blocks_of_mlx_stand_for_what_mlx_makes_of_them(tmp_path: Path) -> None:
    """Of six kinds of blocks; mlx-lm made them, and dequantised them again."""
    blocks, source = FILES / "mixtral.mlx_blocks", save_source(tmp_path / "s", "mixtral", EXPERTS)
    result = growkit.verify(FILES / "mixtral.mlx_numbers", blocks, QUICK)
    assert result["verdict"] == "preserved"
    assert "has no rope_theta, so mlx-lm computes with its own" in result["reason"]
    result = growkit.verify(source, blocks, QUICK)
    assert result["verdict"] == "not preserved"
    assert "8 weights are rounded to blocks of few bits, at most" in result["reason"]
    assert result["sections"]["logits"]["strict_float64"]["kl_nats_per_token"] > 0


def test_parts_of_a_gguf_file_are_one_model(tmp_path: Path) -> None:
    """Any of them may be given, beside another model; llama.cpp wrote them."""
    source = save_source(tmp_path / "source", "llama")
    folder = shutil.copytree(FILES / "llama.parts", tmp_path / "parts")
    shutil.copy(FILES / "qwen3.gguf", folder)
    result = growkit.verify(source, folder / "llama-00002-of-00003.gguf", QUICK)
    assert result["verdict"] == "preserved"
    assert result["sections"]["weights"]["tensors_recovered"] == 20


def with_count(at: int, count: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + struct.pack("<Q", count) + content[at + 8 :]


def replacing(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new, 1)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "header is not complete"),
    "another file": (lambda content: b"GGML" + content[4:], "does not begin with GGUF"),
    "cut header": (lambda content: content[:200], "header is not complete"),
    "cut data": (lambda content: content[:-64], "tensors are not complete"),
    "countless tensors": (with_count(8, 1 << 40), "more than 131,072 tensors"),
    "endless text": (with_count(24, 1 << 62), "more than 134,217,728 bytes"),
    "an odd architecture": (
        replacing(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lxama"),
        "'lxama' is none of",
    ),
    "an unknown setting": (
        replacing(b"llama.context_length", b"llama.context_lengxh"),
        "context_length is missing",
    ),
    "heads that do not fit": (setting("head_count_kv", "I", 3), "do not fit"),
    "countless heads": (setting("llama.attention.head_count", "I", 1 << 31), "do not fit"),
    "another vocabulary": (setting("llama.vocab_size", "I", 31), "32 was expected"),
    "an unknown tensor": (replacing(b"blk.1.ffn_up", b"blk.1.ffn_ux"), "blk.1.ffn_ux.weight"),
    "one tensor twice": (replacing(b"blk.1.ffn_up", b"blk.0.ffn_up"), "same name"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    edit, told = DAMAGED[damage]
    content = (FILES / "llama.gguf").read_bytes()
    (tmp_path / "wrong.gguf").write_bytes(edit(content))
    shown = cli("inspect", tmp_path / "wrong.gguf")
    assert shown.exit_code == 2
    message = " ".join(shown.stderr.split())
    assert message.startswith("error: ")
    assert told in message
    assert "wrong.gguf" in message


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_two_versions_of_gguf_are_read(tmp_path: Path, version: int) -> None:
    content = (FILES / "llama.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    assert cli("inspect", tmp_path / "m.gguf").exit_code == (0 if version in (2, 3) else 2)


GATE = "block_sparse_moe.switch_mlp.gate_proj"


def hold_one_twice(folder: Path) -> None:
    """Former files of litgpt have ``attn.attn``, later ones ``attn.qkv``."""
    state = torch.load(folder / "lit_model.pth")
    state["transformer.h.0.attn.attn.weight"] = state["transformer.h.0.attn.qkv.weight"].clone()
    torch.save(state, folder / "lit_model.pth")


def with_bits(layer: str, bits: int) -> Callable[[Path], None]:
    """Settings of MLX for a layer."""

    def edit(folder: Path) -> None:
        quantised = json.loads((folder / "config.json").read_text())["quantization"]
        quantised[f"model.layers.0.{layer}"] = {"group_size": 32, "bits": bits}
        edit_config(folder, quantization=quantised, quantization_config=None)

    return edit


def lose_a_part(folder: Path) -> None:
    (folder / "llama-00003-of-00003.gguf").unlink()


def exchange_parts(folder: Path) -> None:
    second, third = (folder / f"llama-0000{number}-of-00003.gguf" for number in (2, 3))
    content = second.read_bytes()
    third.replace(second)
    third.write_bytes(content)


def add_files(*names: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        for name in names:
            shutil.copy(FILES / "llama.gguf", folder / name)

    return add


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("llama.litgpt", hold_one_twice, r"attn.attn.weight in .* both hold .*_proj.weight"),
        ("llama.litgpt", add_files("llama.gguf"), r"lit_model.pth \(litgpt\)"),
        ("llama.parts", add_files("a.gguf"), "4 GGUF files"),
        ("llama.parts", lose_a_part, "file 0 of 3, .* but it is file 0 of 2 by the names"),
        ("llama.parts", exchange_parts, "00002-of-00003.gguf says that it is file 2 of 3"),
        ("mixtral.mlx_blocks", with_bits("self_attn.q_proj", 4), "their settings do not fit"),
        ("mixtral.mlx_blocks", with_bits(GATE, 5), "experts.0.w1.weight .* settings do not fit"),
        ("mixtral.mlx_blocks", with_bits(GATE, 7), "mode 'affine' with 7 bits"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    folder = shutil.copytree(FILES / name, tmp_path / "model")
    spoil(folder)
    with pytest.raises(InputError, match=reason):
        growkit.inspect(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_columns", [False, True], ids=["Llama 3", "Llama 2"])
def test_files_of_metas_ranks_are_put_together(tmp_path: Path, by_columns: bool) -> None:
    """Llama 2 divides the embedding by columns, Llama 3 by rows."""
    source, out = save_model(tmp_path / "source", "llama", vocab_size=30), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    full_state: dict[str, torch.Tensor] = {}
    ranks: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in load_file(source / "model.safetensors").items():
        for kind, count in heads.items():
            if kind in name:  # halves of a head become pairs
                parts = tensor.view(count, 2, -1, tensor.shape[1])
                tensor = parts.transpose(1, 2).reshape(tensor.shape)
        renamed = name
        for own, theirs in listed("formats", "names of meta").items():
            renamed = renamed.replace(own, theirs)
        full_state[renamed] = tensor.contiguous()
        columns = renamed.endswith(("wo.weight", "w2.weight")) or (by_columns and "tok" in renamed)
        for rank, state in enumerate(ranks):
            part = tensor.chunk(2, int(columns))[rank] if tensor.dim() > 1 else tensor
            state[renamed] = part.clone()
    out.mkdir()
    for rank, state in enumerate(ranks):
        torch.save(state, out / f"consolidated.0{rank}.pth")
    params = {"dim": config["hidden_size"], "n_layers": config["num_hidden_layers"]}
    params |= {"n_heads": heads["q_proj"], "n_kv_heads": heads["k_proj"], "vocab_size": -1}
    params |= {"norm_eps": config["rms_norm_eps"], "multiple_of": 2, "rope_theta": 10000.0}
    (out / "params.json").write_text(json.dumps(params))
    result = growkit.verify(source, out, QUICK)
    assert result["verdict"] == "preserved"
    assert result["sections"]["weights"]["recovered"]
    torch.save({**ranks[1], "more.weight": torch.zeros(2)}, out / "consolidated.01.pth")
    with pytest.raises(InputError, match=r"more.weight is not in all of them"):
        growkit.verify(source, out, QUICK)
    ranks[1]["norm.weight"][0] += 1
    torch.save(ranks[1], out / "consolidated.01.pth")
    with pytest.raises(InputError, match=r"norm.weight is not the same in all"):
        growkit.verify(source, out, QUICK)
    (out / "consolidated.00.pth").unlink()
    with pytest.raises(InputError, match=r"no consolidated.00.pth"):
        growkit.verify(source, out, QUICK)
    titan = tmp_path / "torchtitan"  # the same names, in torch.distributed.checkpoint
    dcp.save(full_state, checkpoint_id=titan, no_dist=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, titan)
    assert growkit.verify(source, titan, QUICK)["verdict"] == "preserved"
    growkit.convert(source, tmp_path / "meta", "meta", verify=False)
    state = torch.load(tmp_path / "meta" / "consolidated.00.pth")
    assert state.keys() == full_state.keys()
    assert all(state[name].equal(full_state[name]) for name in state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TYPES["megatron"])
def test_a_checkpoint_of_megatron_core_is_its_source(tmp_path: Path, kind: str) -> None:
    """Layers and experts are stacked, and modules have states of their own, which are empty."""
    source, theirs = save_source(tmp_path / "source", kind), FILES / f"{kind}.megatron"
    growkit.convert(source, tmp_path / "own", "megatron", verify=False)
    (entries, state), (own, _) = map(of_distributed, (theirs, tmp_path / "own"))
    assert entries.items() <= own.items()
    for file in ("common.pt", "metadata.json"):
        assert (tmp_path / "own" / file).read_bytes()
    table = "embedding.word_embeddings.weight"
    state[table] = torch.nn.functional.pad(state[table], (0, 0, 0, 3))  # as it may be
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
    out = tmp_path / "out"
    for factor in (1, 2):
        state["decoder.layers.self_attention.linear_qkv.weight"][1, -1] *= factor  # of a value
        shutil.rmtree(out, ignore_errors=True)
        dcp.save(state, checkpoint_id=out, no_dist=True)
        for name in ("config.json", "generation_config.json"):
            shutil.copy(source / name, out)
        result = growkit.verify(source, out, QUICK)
        assert (result["verdict"] == "preserved") == (factor == 1)
    assert result["fault"]["tensor"] == "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bias_that_balances_experts_in_torchtitan_must_be_zero(tmp_path: Path) -> None:
    """transformers' Qwen3-MoE has none, and torchtitan's own conversion drops it."""
    source, own = save_source(tmp_path / "source", "qwen3_moe"), FILES / "qwen3_moe.torchtitan"
    shutil.copytree(own, tmp_path / "out", ignore=shutil.ignore_patterns("*.distcp", ".metadata"))
    state = of_distributed(own)[1]
    state["layers.1.moe.expert_bias_E"][2] = 0.5
    dcp.save(state, checkpoint_id=tmp_path / "out", no_dist=True)
    with pytest.raises(InputError, match=r"layers.1.moe.expert_bias_E .* is not zero"):
        growkit.verify(source, tmp_path / "out", QUICK)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_layers_that_differ_have_names_of_their_own_in_megatron_core(tmp_path: Path) -> None:
    source = save_model(
        tmp_path / "source", "qwen3_moe", mlp_only_layers=[0], num_experts=2, num_experts_per_tok=1
    )
    result = growkit.convert(source, tmp_path / "out", "megatron", verify=QUICK)
    assert result["kept"]
    assert not result["verification"]["sections"]["files"]["unknown_files"]
    names = of_distributed(tmp_path / "out")[0]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_0_2" in names


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
WORDS += r"\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {"qwen2": WORDS % r"\p{N}", "llama-bpe": WORDS % r"\p{N}{1,3}", "default": ""}
"""How text is divided, by llama.cpp's names; the last one has pieces as sentencepiece does."""

TEXT = (FILES.parents[1] / "README.md").read_text("utf-8")


def with_trained_tokenizer(folder: Path, rule: str) -> Path:
    """A model with a tokenizer that begins every text with a token."""
    begin, single = "<s>", [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    train: dict[str, Any] = {"vocab_size": 600, "show_progress": False, "special_tokens": [begin]}
    if RULES[rule]:
        train["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        divided = pre_tokenizers.Split(Regex(RULES[rule]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([divided, as_bytes])
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(**train))
    if not RULES[rule]:
        pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)[1:]
        halves = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
        merges = [pair for pair in halves if {*pair} <= {*pieces}]
        vocab = {piece: number for number, piece in enumerate([begin, *single, *pieces])}
        tokenizer.model = models.BPE(vocab, merges, byte_fallback=True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_a_gguf_file_has_the_tokenizer(tmp_path: Path, rule: str) -> None:
    """As transformers reads it from the file; and llama.cpp, where that is installed."""
    pytest.importorskip("gguf")
    source = with_trained_tokenizer(save_model(tmp_path / "source", "llama", vocab_size=900), rule)
    assert not growkit.convert(source, tmp_path / "out", "gguf", verify=False)["warnings"]
    assert stored(tmp_path / "out")[1]["tokenizer.ggml.pre"] == rule
    own = AutoTokenizer.from_pretrained(source)
    reader = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    texts = [*filter(None, map(str.strip, TEXT.split("\n\n"))), "1984 Ǆ 模型 \U0001f642"]
    expected = [own(text).input_ids for text in texts]
    assert [reader(text).input_ids for text in texts] == expected
    with suppress(ImportError):
        from llama_cpp import Llama

        program = Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
        assert [program.tokenize(text.encode(), special=True) for text in texts] == expected


NO_TOKENIZER: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("qwen2", lambda t: t["pre_tokenizer"]["pretokenizers"].pop(0), "no name that llama.cpp has"),
    ("qwen2", lambda t: t.update(pre_tokenizer=None), "no tokens for single bytes"),
    ("qwen2", lambda t: t["model"].update(end_of_word_suffix="/"), "no equal of its BPE"),
    ("qwen2", lambda t: t["post_processor"]["single"].reverse(), "adds other tokens to a text"),
    ("default", lambda t: t["model"]["merges"].pop(), "no scores of its tokens give the order"),
    ("default", lambda t: t["normalizer"]["normalizers"].pop(1), "replaces spaces, or single"),
    ("default", lambda t: t["model"]["vocab"].pop("<0xFF>"), "replaces spaces, or single bytes"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(len(NO_TOKENIZER)))
def test_a_tokenizer_that_llama_cpp_does_not_have_is_left_out(tmp_path: Path, case: int) -> None:
    pytest.importorskip("gguf")
    rule, edit, reason = NO_TOKENIZER[case]
    source = with_trained_tokenizer(save_model(tmp_path / "source", "llama", vocab_size=900), rule)
    content = json.loads((source / "tokenizer.json").read_text("utf-8"))
    edit(content)
    (source / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (warning,) = growkit.convert(source, tmp_path / "out", "gguf", verify=False)["warnings"]
    assert reason in warning
    assert stored(tmp_path / "out")[1]["tokenizer.ggml.model"] == "none"
