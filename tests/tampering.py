"""Folders that somebody tampered with: none is preserved without the difference being named.

``python -m tests.tampering --count 200`` draws as many by seed, in all parts of a folder, with and
without a manifest, as if models were too large to be loaded as a whole. The suite tries a few.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

import growkit
from growkit.base.errors import InputError
from growkit.proof import modes
from tests.conftest import randomise, save_model

DEMO = Path(growkit.__file__).parent / "cli" / "demo" / "model"
QUICK: dict[str, Any] = {"prompts": 1, "length": 10}
EVIL = "open('ran', 'w')\nclass LlamaForCausalLM: pass\n"


@dataclass(frozen=True)
class Tampering:
    """One way to tamper with a folder.

    Attributes:
        part: of the folder: weights, config, …
        spoil: does it, and says what a verdict must name.
        pairs: names of the pairs that it is for.
        bare: whether it is seen without a manifest as well.
    """

    part: str
    spoil: Callable[[Path, random.Random], str]
    pairs: tuple[str, ...]
    bare: bool


TAMPERINGS: list[Tampering] = []
ALL = ("llama", "diff", "bounded")


def tampering(
    part: str, *pairs: str, bare: bool = True
) -> Callable[[Callable[[Path, random.Random], str]], Callable[[Path, random.Random], str]]:
    def add(spoil: Callable[[Path, random.Random], str]) -> Callable[[Path, random.Random], str]:
        TAMPERINGS.append(Tampering(part, spoil, pairs or ALL, bare))
        return spoil

    return add


@contextmanager
def opened(file: Path) -> Iterator[dict[str, Any]]:
    content = json.loads(file.read_text()) if file.exists() else {}
    yield content
    file.write_text(json.dumps(content))


@contextmanager
def tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    file = folder / "model.safetensors"
    content = load_file(file)
    yield content
    save_file({name: each.contiguous() for name, each in content.items()}, file, {"format": "pt"})


# Weights


@tampering("weights")
def a_matrix_scaled(folder: Path, choose: random.Random) -> str:
    with tensors(folder) as content:
        name = choose.choice([n for n, t in sorted(content.items()) if "mlp" in n and t.dim() > 1])
        content[name] = content[name] * 1.01
    return name.split(".mlp")[0]


@tampering("weights", bare=False)
def the_last_bit_of_a_weight(folder: Path, choose: random.Random) -> str:
    with tensors(folder) as content:
        name = choose.choice(
            [n for n in sorted(content) if "lambda" not in n and "shared" not in n]
        )
        name = "model.embed_tokens.weight" if "_proj" in name and "mlp" not in name else name
        flat = content[name].flatten()
        flat[choose.randrange(len(flat))] *= 1 + 2**-22
        content[name] = flat.view_as(content[name])
    return name


@tampering("weights")
def a_tensor_under_two_names(folder: Path, choose: random.Random) -> str:
    with tensors(folder) as content:
        name = choose.choice([n for n in sorted(content) if n.startswith("model.layers.")])
        content[name.removeprefix("model.")] = content[name] * 2
    return name.removeprefix("model.")


@tampering("weights")
def a_tensor_that_nothing_reads(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["extra.weight", "model.layers.0.mlp.gate.e_score_correction_bias"])
    with tensors(folder) as content:
        content[name] = torch.ones(4)
    return name


@tampering("buffers", "experts")
def a_bias_of_experts(folder: Path, choose: random.Random) -> str:
    with tensors(folder) as content:
        name = choose.choice([n for n in sorted(content) if "e_score_correction_bias" in n])
        content[name] = content[name] + torch.linspace(-4, 4, len(content[name]))
    return "e_score_correction_bias"


@tampering("buffers", "experts")
def a_bias_of_experts_is_missing(folder: Path, choose: random.Random) -> str:
    with tensors(folder) as content:
        name = choose.choice([n for n in sorted(content) if "e_score_correction_bias" in n])
        del content[name]
    return name


# Config

SETTINGS: list[tuple[str, Any]] = [
    ("max_position_embeddings", 32),
    ("max_position_embeddings", 4096),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
    ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    ("eos_token_id", 3),
    ("eos_token_id", [2, 3]),
    ("bos_token_id", 5),
    ("pad_token_id", 4),
    ("dtype", "float16"),
    ("rms_norm_eps", 0.1),
    ("hidden_act", "gelu"),
    ("fusion_config", {"patch_embeddings": True}),
    ("quantization_config", {"quant_method": "fp8"}),
    ("configuration_files", ["config.4.0.0.json"]),
    ("attn_implementation", "nobody/kernel"),
    ("_attn_implementation", "nobody/kernel@main:name"),
    ("experts_implementation", "nobody/kernel"),
    ("auto_map", {"AutoModelForCausalLM": "modeling_evil.LlamaForCausalLM"}),
    ("auto_map", {"AutoConfig": "nobody/repo--configuration_evil.Config"}),
    ("num_hidden_layers", 10**9),
    ("model_type", "mixtral"),
    ("architectures", ["EvilForCausalLM"]),
]


@tampering("config", "llama", "diff")
def a_setting(folder: Path, choose: random.Random) -> str:
    key, value = choose.choice(SETTINGS)
    with opened(folder / "config.json") as config:
        config[key] = value
    if key == "configuration_files":
        shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    # What model a type stands for decides on what is missed first.
    return {"model_type": "", "num_hidden_layers": "layers", "hidden_act": ""}.get(key, key)


@tampering("config", "llama", "diff")
def other_weights_by_name(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["model.other.safetensors", "consolidated.safetensors"])
    content = load_file(folder / "model.safetensors")
    save_file({n: t * 2 for n, t in content.items()}, folder / name, {"format": "pt"})
    with opened(folder / "config.json") as config:
        config["transformers_weights"] = name
    return "transformers_weights"


# Tokenizer and generation


@tampering("tokenizer", "llama")
def two_tokens_swapped(folder: Path, choose: random.Random) -> str:
    with opened(folder / "tokenizer.json") as tokenizer:
        ids = tokenizer["model"]["vocab"]
        one, other = choose.sample([t for t in sorted(ids) if len(t) == 1 and t.isalpha()], 2)
        ids[one], ids[other] = ids[other], ids[one]
    return "token"


@tampering("tokenizer", "llama")
def a_step_of_the_tokenizer(folder: Path, choose: random.Random) -> str:
    with opened(folder / "tokenizer.json") as tokenizer:
        tokenizer["normalizer"] = {"type": choose.choice(["Lowercase", "NFKD"])}
    return "tokenizer"


@tampering("tokenizer", "llama")
def a_setting_of_the_tokenizer(folder: Path, choose: random.Random) -> str:
    key, value = choose.choice(
        [
            ("eos_token", "b"),
            ("bos_token", "b"),
            ("pad_token", "c"),
            ("chat_template", "{{ messages }}"),
            ("model_max_length", 7),
            ("padding_side", "left"),
            ("clean_up_tokenization_spaces", True),
            ("additional_special_tokens", ["e"]),
        ]
    )
    with opened(folder / "tokenizer_config.json") as config:
        assert config.get(key) != value
        config[key] = value
    return "token"


@tampering("tokenizer", "llama")
def a_file_of_the_tokenizer(folder: Path, choose: random.Random) -> str:
    name, content = choose.choice(
        [
            ("chat_template.jinja", "{{ messages }}"),
            ("added_tokens.json", '{"<evil>": 3}'),
            ("special_tokens_map.json", '{"eos_token": "b"}'),
            ("additional_chat_templates/evil.jinja", "{{ messages }}"),
        ]
    )
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return "" if name in ("added_tokens.json", "special_tokens_map.json") else "template"


@tampering("tokenizer", "llama")
def another_version_of_the_tokenizer(folder: Path, choose: random.Random) -> str:
    with opened(folder / "tokenizer.json") as tokenizer:
        content = json.loads(json.dumps(tokenizer))
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.4.0.0.json").write_text(json.dumps(content))
    with opened(folder / "tokenizer_config.json") as config:
        config["fast_tokenizer_files"] = ["tokenizer.4.0.0.json"]
    return "tokenizer"


@tampering("tokenizer", "llama")
def a_tokenizer_that_names_a_file(folder: Path, choose: random.Random) -> str:
    key = choose.choice(["vocab", "merges", "merges_file"])
    with opened(folder / "tokenizer_config.json") as config:
        config[key] = "/dev/zero"
    return key


@tampering("tokenizer", "llama", "diff", bare=False)
def a_tokenizer_is_added_or_removed(folder: Path, choose: random.Random) -> str:
    if (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").unlink()
    else:
        shutil.copy(DEMO / "tokenizer.json", folder)
    return "tokenizer.json"


@tampering("generation")
def a_setting_of_generation(folder: Path, choose: random.Random) -> str:
    key, value = choose.choice(
        [
            ("eos_token_id", 3),
            ("do_sample", True),
            ("temperature", 0.1),
            ("repetition_penalty", 2.0),
            ("max_new_tokens", 2),
            ("suppress_tokens", [1, 2]),
            ("forced_eos_token_id", 4),
        ]
    )
    with opened(folder / "generation_config.json") as config:
        config[key] = value
    return "generation"


@tampering("generation", "llama")
def no_settings_of_generation(folder: Path, choose: random.Random) -> str:
    (folder / "generation_config.json").unlink()
    return "generation"


# Code


@tampering("code")
def code_of_a_model(folder: Path, choose: random.Random) -> str:
    (folder / "modeling_evil.py").write_text(EVIL)
    with opened(folder / "config.json") as config:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.LlamaForCausalLM"}
    return "modeling_evil.py" if (folder / "growkit.json").exists() else "auto_map"


@tampering("code")
def code_of_a_tokenizer(folder: Path, choose: random.Random) -> str:
    (folder / "tokenization_evil.py").write_text(EVIL)
    name = choose.choice(["tokenizer_config.json", "processor_config.json"])
    with opened(folder / name) as config:
        config["auto_map"] = {"AutoTokenizer": [None, "tokenization_evil.LlamaForCausalLM"]}
    return name


@tampering("code")
def code_that_generates(folder: Path, choose: random.Random) -> str:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(EVIL)
    return "custom_generate/generate.py"


@tampering("code")
def code_that_nothing_names(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["modeling_llama.py", "handler.py", "sitecustomize.py"])
    (folder / name).write_text(EVIL)
    return name


@tampering("code", "diff")
def code_of_growkit_changed(folder: Path, choose: random.Random) -> str:
    name = choose.choice(sorted(file.name for file in folder.glob("*.py")))
    with (folder / name).open("a") as stream:
        stream.write("\n# changed\n")
    return name


# Links, adapters, shards, other weights


@tampering("links")
def a_link_out_of_the_folder(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"])
    outside = folder.parent / f"outside-{name}"
    if (folder / name).exists():
        shutil.move(folder / name, outside)
    (folder / name).symlink_to(choose.choice([outside, Path("/dev/zero"), folder / "nowhere"]))
    return name


@tampering("links")
def a_pipe(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["tokenizer.model", "generation_config.json", "adapter_model.bin"])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    return name


@tampering("adapters")
def an_adapter(folder: Path, choose: random.Random) -> str:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors", {"format": "pt"})
    return "adapter_config.json"


@tampering("shards")
def a_shard_of_a_distributed_checkpoint(folder: Path, choose: random.Random) -> str:
    name = "shard-00000-model-00001-of-00001.safetensors"
    content = load_file(folder / "model.safetensors")
    save_file({n: t * 2 for n, t in content.items()}, folder / name, {"format": "pt"})
    return name


@tampering("shards")
def other_weights_beside(folder: Path, choose: random.Random) -> str:
    name = choose.choice(
        [
            *("model.fp16.safetensors", "consolidated.safetensors", "model-00002-of-2.safetensors"),
            *("pytorch_model.bin", "model.gguf", "adapter_model.safetensors", "original/a.pth"),
        ]
    )
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x" * 64)
    return name


@tampering("others")
def what_nobody_reads(folder: Path, choose: random.Random) -> str:
    name = choose.choice(["notes.txt", "training_args.bin", "onnx/model.onnx", "params.json"])
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x" * 64)
    return name


# Manifests


@tampering("manifest")
def an_odd_manifest(folder: Path, choose: random.Random) -> str:
    if not (folder / "growkit.json").exists():
        return "manifest"
    with opened(folder / "growkit.json") as manifest:
        place = choose.choice(
            [manifest, manifest["recipe"], manifest["recipe"]["steps"][0], {"x": 0}]
        )
        key = choose.choice(sorted(place))
        place[key] = choose.choice([None, [], {}, -1, 1e308, "", "x" * 99, [[{}]], True, 10**30])
        if place is not manifest:
            manifest["kl_by_rank"] = place
    return ""


@tampering("manifest", "llama", "diff", bare=False)
def a_manifest_that_names_files(folder: Path, choose: random.Random) -> str:
    with opened(folder / "growkit.json") as manifest:
        step = {"convert": "shared-diff", "rank": choose.choice(["auto", "2"])}
        step |= {"calibration": "/dev/zero"} | (
            {"tolerance": "1"} if step["rank"] == "auto" else {}
        )
        manifest["recipe"]["steps"] = [step | choose.choice([{}, {"shrinkage": "0.5"}])]
    return "recipe"


@tampering("manifest", bare=False)
def the_manifest_of_another(folder: Path, choose: random.Random) -> str:
    with opened(folder / "growkit.json") as manifest:
        manifest["recipe"]["steps"] = [{"grow": "hypercloning", "hidden": choose.choice(["x3", 7])}]
    return ""


# The study


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of 256 bytes, and settings of generation."""
    shutil.copy(DEMO / "tokenizer.json", folder)
    with opened(folder / "tokenizer.json") as tokenizer:
        keep = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[:256]
        tokenizer["model"]["vocab"] = dict(keep)
        tokenizer["model"]["merges"] = []
        tokenizer["added_tokens"] = []
        tokenizer["post_processor"] = None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "d", "bos_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 50}')


def make_pairs(folder: Path) -> None:
    """Sources and targets, by the names of the pairs."""
    llama = save_model(folder / "llama" / "source", "llama", vocab_size=300, eos_token_id=2)
    add_tokenizer(llama)
    growkit.grow(llama, folder / "llama" / "target", hidden="x2", verify=False)
    diff = save_model(folder / "diff" / "source", "diffllama", head_dim=4)
    growkit.grow(
        diff,
        folder / "diff" / "target",
        method="group-diff",
        hidden="x2",
        signal_heads="x2",
        verify=False,
    )
    shared = save_model(folder / "bounded" / "source", "diffllama", head_dim=8)
    growkit.convert(shared, folder / "bounded" / "target", to="shared-diff", rank=1, verify=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        DeepseekV3Config(
            vocab_size=29,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
            max_position_embeddings=64,
        )
    )
    randomise(model, 0)
    model.save_pretrained(folder / "experts" / "source")
    shutil.copytree(folder / "experts" / "source", folder / "experts" / "target")


def cases(count: int, seed: int) -> list[tuple[Tampering, str, bool, int]]:
    """Seeded draws: the tampering, the pair, whether the manifest stays, and a seed."""
    choose = random.Random(seed)
    found = []
    for number in range(count):
        each = TAMPERINGS[number % len(TAMPERINGS)]
        pair = choose.choice(each.pairs)
        keeps = pair != "experts" and (not each.bare or choose.random() < 0.6)
        found.append((each, pair, keeps, choose.randrange(2**32)))
    return found


def tried(case: tuple[Tampering, str, bool, int], pairs: Path, scratch: Path) -> str | None:
    """Tamper with a copy and prove it.

    Returns:
        What is wrong with the verdict; None if it is right.
    """
    each, pair, keeps, seed = case
    target = shutil.copytree(pairs / pair / "target", scratch / "target")
    wanted = each.spoil(target, random.Random(seed))
    if not keeps:
        (target / "growkit.json").unlink(missing_ok=True)
    try:
        result = growkit.verify(pairs / pair / "source", target, **QUICK)
    except InputError as error:
        said = str(error).replace(str(target), "OUT")
        return None if wanted in str(error) or each.part == "manifest" else f"refused: {said}"
    said = result["reason"].replace(str(target), "OUT")
    if not result["kept"]:
        return None
    if each.part == "manifest" and wanted == "":
        return None if pair_is_sound(result["reason"]) else f"kept: {said}"
    return None if wanted and wanted in result["reason"] else f"kept: {said}"


def pair_is_sound(reason: str) -> bool:
    """Whether a verdict on untouched weights says what it rests on."""
    said = ("every weight is recovered", "not compared", "as asked", "as requested")
    return any(words in reason for words in said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name, patch.object(modes, "MOST_BYTES", 0):
        make_pairs(Path(name) / "pairs")
        for number, case in enumerate(cases(asked.count, asked.seed)):
            scratch = Path(name) / str(number)
            scratch.mkdir()
            what = tried(case, Path(name) / "pairs", scratch)
            shutil.rmtree(scratch)
            if what:
                wrong += 1
                print(number, case[0].spoil.__name__, case[1:], what)  # noqa: T201
    print(f"{asked.count - wrong} of {asked.count} right")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
