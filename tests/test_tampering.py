"""Folders that somebody tampered with: none is preserved without the difference being named."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit.base.errors import InputError
from growkit.cli.demo import MODEL
from growkit.proof.files import FolderDifferences
from tests.families import FAMILIES
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import save_model, save_random

QUICK: dict[str, Any] = {"prompts": 1, "length": 10}
EVIL = "open('ran', 'w')\nclass LlamaForCausalLM: pass\n"


Spoil = Callable[[Path, random.Random], str]
"""Tampers with a folder, and returns what a verdict must name."""

ALL = ("llama", "diff", "bounded")


@dataclass(frozen=True)
class Tampering:
    """One way to tamper with a folder.

    Attributes:
        name: what it does.
        part: of the folder: weights, config, …
        spoil: does it.
        pairs: names of the pairs that it is for.
        bare: whether it is seen without a manifest as well.
    """

    name: str
    part: str
    spoil: Spoil
    pairs: tuple[str, ...] = ALL
    bare: bool = True


LAYER = re.compile(r".*?\.\d+(?=\.)")


def in_weights(edit: Callable[[dict[str, torch.Tensor], random.Random], str]) -> Spoil:
    def spoil(folder: Path, choose: random.Random) -> str:
        with edit_weights(folder) as tensors:
            return edit(tensors, choose)

    return spoil


def in_json(name: str, edit: Callable[[dict[str, Any], random.Random], Any], wanted: str) -> Spoil:
    def spoil(folder: Path, choose: random.Random) -> str:
        with edit_json(folder / name) as content:
            edit(content, choose)
        return wanted

    return spoil


def setting(name: str, wanted: str, *choices: tuple[str, Any]) -> Spoil:
    """Give a key in a JSON file another value."""

    def spoil(folder: Path, choose: random.Random) -> str:
        key, value = choose.choice(choices)
        with edit_json(folder / name) as content:
            assert content.get(key) != value
            content[key] = value
        return wanted or key

    return spoil


def added(*names: str, content: str = "x" * 64, wanted: str = "") -> Spoil:
    """Add a file, or replace it."""

    def spoil(folder: Path, choose: random.Random) -> str:
        name = choose.choice(names)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        return wanted or name

    return spoil


def of(tensors: dict[str, torch.Tensor], choose: random.Random, *parts: str) -> str:
    """The name of a tensor that contains one of these."""
    return choose.choice([name for name in sorted(tensors) if any(part in name for part in parts)])


def scale_a_matrix(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    matrices = [name for name, tensor in sorted(tensors.items()) if tensor.dim() > 1]
    in_layers = [name for name in matrices if LAYER.match(name)]
    name = choose.choice([name for name in in_layers if "mlp" in name] or in_layers)
    tensors[name] *= 1.01
    return LAYER.findall(name)[0]


def change_the_last_bit(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    name = of(tensors, choose, "mlp", "norm", "embed", "lm_head")
    flat = tensors[name].view(-1)
    flat[choose.randrange(len(flat))] *= 1 + 2**-22
    return name


def store_a_tensor_twice(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    name = of(tensors, choose, "model.layers.")
    tensors[name.removeprefix("model.")] = tensors[name] * 2
    return name.removeprefix("model.")


def add_a_tensor(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    name = choose.choice(["extra.weight", "model.layers.0.mlp.gate.e_score_correction_bias"])
    tensors[name] = torch.ones(4)
    return name


BIAS = "e_score_correction_bias"


def change_a_bias(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    bias = tensors[of(tensors, choose, BIAS)]
    bias += torch.linspace(-4, 4, len(bias))
    return BIAS


def remove_a_bias(tensors: dict[str, torch.Tensor], choose: random.Random) -> str:
    name = of(tensors, choose, BIAS)
    del tensors[name]
    return name


SETTINGS: list[tuple[str, Any]] = listed("tampering", "settings")


def swap_two_tokens(tokenizer: dict[str, Any], choose: random.Random) -> None:
    ids = tokenizer["model"]["vocab"]
    one, other = choose.sample([t for t in sorted(ids) if len(t) == 1 and t.isalpha()], 2)
    ids[one], ids[other] = ids[other], ids[one]


def name_another_tokenizer(folder: Path, choose: random.Random) -> str:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.4.0.0.json").write_text(json.dumps(content))
    with edit_json(folder / "tokenizer_config.json") as config:
        config["fast_tokenizer_files"] = ["tokenizer.4.0.0.json"]
    return "tokenizer"


def add_or_remove_a_tokenizer(folder: Path, choose: random.Random) -> str:
    if (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").unlink()
    else:
        shutil.copy(MODEL / "tokenizer.json", folder)
    return "tokenizer.json"


def remove_generation(folder: Path, choose: random.Random) -> str:
    (folder / "generation_config.json").unlink()
    return "generation"


def add_code_of_a_model(folder: Path, choose: random.Random) -> str:
    (folder / "modeling_evil.py").write_text(EVIL)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.LlamaForCausalLM"})
    return "modeling_evil.py" if (folder / "growkit.json").exists() else "auto_map"


def add_code_of_a_tokenizer(folder: Path, choose: random.Random) -> str:
    (folder / "tokenization_evil.py").write_text(EVIL)
    name = choose.choice(["tokenizer_config.json", "processor_config.json"])
    with edit_json(folder / name) as config:
        config["auto_map"] = {"AutoTokenizer": [None, "tokenization_evil.LlamaForCausalLM"]}
    return name


def change_code_of_growkit(folder: Path, choose: random.Random) -> str:
    name = choose.choice(sorted(file.name for file in folder.glob("*.py")))
    with (folder / name).open("a") as stream:
        stream.write("\n# changed\n")
    return name


LLAMA, TWO = ("llama",), ("llama", "diff")
CONFIG, TOKENIZER, TOKENS = "config.json", "tokenizer.json", "tokenizer_config.json"
# What model a type means decides on what is missed first, and so do layers.
STRUCTURE = setting(CONFIG, "layers", ("num_hidden_layers", 10**9))
OTHER_MODELS = [{"hidden_act": "gelu"}, {"model_type": "mixtral"}]
ANYTHING = in_json(CONFIG, lambda c, choose: c.update(choose.choice(OTHER_MODELS)), "")
TOKENIZER_SETTINGS: list[tuple[str, Any]] = listed("tampering", "tokenizer settings")
NAMED_FILES = [(key, "/dev/zero") for key in ("vocab", "merges", "merges_file")]
GENERATION = setting(
    "generation_config.json", "generation", *listed("tampering", "settings of generation")
)
STEPS = [("normalizer", {"type": kind}) for kind in ("Lowercase", "NFKD")]
TEMPLATE = ("chat_template.jinja", "additional_chat_templates/evil.jinja")
TOKENIZER_PROVENANCE = {
    "two tokens": in_json(TOKENIZER, swap_two_tokens, "token"),
    "a step": setting(TOKENIZER, "tokenizer", *STEPS),
    "a setting": setting(TOKENS, "token", *TOKENIZER_SETTINGS),
    "a template": added(*TEMPLATE, content="{{ messages }}", wanted="template"),
    "a token": added("added_tokens.json", content='{"<evil>": 3}', wanted="token"),
    "eos": added("special_tokens_map.json", content='{"eos_token": "b"}', wanted="token"),
    "another version": name_another_tokenizer,
    "a file": setting(TOKENS, "", *NAMED_FILES),
}
OTHER_WEIGHTS = (
    *("model.fp16.safetensors", "consolidated.safetensors", "model-00002-of-2.safetensors"),
    *("pytorch_model.bin", "model.gguf", "adapter_model.safetensors", "original/a.pth"),
)
UNREAD = ("notes.txt", "training_args.bin", "onnx/model.onnx", "params.json")
CODE = ("modeling_llama.py", "handler.py", "sitecustomize.py")
TAMPERINGS = [
    Tampering("a scaled matrix", "weights", in_weights(scale_a_matrix)),
    Tampering("the last bit", "weights", in_weights(change_the_last_bit), bare=False),
    Tampering("a tensor twice", "weights", in_weights(store_a_tensor_twice)),
    Tampering("a tensor too many", "weights", in_weights(add_a_tensor)),
    Tampering("a bias of experts", "buffers", in_weights(change_a_bias), ("experts",)),
    Tampering("no bias of experts", "buffers", in_weights(remove_a_bias), ("experts",)),
    Tampering("a setting", "config", setting(CONFIG, "", *SETTINGS), TWO),
    Tampering("layers", "config", STRUCTURE, TWO),
    Tampering("another model", "config", ANYTHING, TWO),
    *(Tampering(name, "tokenizer", spoil, LLAMA) for name, spoil in TOKENIZER_PROVENANCE.items()),
    Tampering("added or removed", "tokenizer", add_or_remove_a_tokenizer, TWO, bare=False),
    Tampering("a setting", "generation", GENERATION),
    Tampering("no settings", "generation", remove_generation, LLAMA),
    Tampering("a model's", "code", add_code_of_a_model),
    Tampering("a tokenizer's", "code", add_code_of_a_tokenizer),
    Tampering("generates", "code", added("custom_generate/generate.py", content=EVIL)),
    Tampering("not named", "code", added(*CODE, content=EVIL)),
    Tampering("growkit's", "code", change_code_of_growkit, ("diff",)),
    Tampering("other weights", "shards", added(*OTHER_WEIGHTS)),
    Tampering("a file that nothing reads", "rest", added(*UNREAD)),
]


# The study


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of 256 bytes, and settings of generation."""
    shutil.copy(MODEL / "tokenizer.json", folder)
    with edit_json(folder / "tokenizer.json") as tokenizer:
        keep = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[:256]
        tokenizer["model"]["vocab"] = dict(keep)
        tokenizer["model"]["merges"] = []
        tokenizer["added_tokens"] = []
        tokenizer["post_processor"] = None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "d", "bos_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 40}')


def make_pairs(folder: Path) -> None:
    """Sources and targets, by the names of the pairs."""
    llama = save_model(folder / "llama" / "source", "llama", vocab_size=300, eos_token_id=2)
    add_tokenizer(llama)
    growkit.grow(llama, folder / "llama" / "target", hidden="x2", verify=False)
    diff = save_model(folder / "diff" / "source", "diffllama", head_dim=4)
    heads = {"method": "group-diff", "signal_heads": "x2"}
    growkit.grow(diff, folder / "diff" / "target", hidden="x2", verify=False, **heads)
    shared = save_model(folder / "bounded" / "source", "diffllama", head_dim=8)
    growkit.convert(shared, folder / "bounded" / "target", to="shared-diff", rank=1, verify=False)
    config = FAMILIES["deepseek_v3"].any(random.Random(0)) | {"first_k_dense_replace": 1}
    save_random(folder / "experts" / "source", CONFIG_MAPPING["deepseek_v3"](**config))
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
        return None if wanted in str(error) else f"refused: {said}"
    said = result["reason"].replace(str(target), "OUT")
    if not result["kept"]:
        named = each.part not in ("tokenizer", "generation", "code") or wanted in said
        return None if named else f"not named: {said}"
    return None if wanted and wanted in result["reason"] else f"kept: {said}"


CASES = cases(200, seed=1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_pairs(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].part}-{c[0].name}-{c[1]}-{c[2]}")
@pytest.mark.sampled(4)
def test_a_difference_is_named(
    case: tuple[Tampering, str, bool, int], pairs: Path, tmp_path: Path
) -> None:
    assert tried(case, pairs, tmp_path) is None


@pytest.mark.parametrize(
    ("pair", "keeps"), [("llama", True), ("diff", False), ("bounded", False), ("experts", False)]
)
def test_untouched_folders(pair: str, keeps: bool, pairs: Path, tmp_path: Path) -> None:
    """The control; without a manifest, what is to be lossy is held to be the same."""

    def untouched(folder: Path, choose: object) -> str:
        return "nothing"

    case = Tampering("nothing", "none", untouched), pair, keeps, 0
    wrong = tried(case, pairs, tmp_path)
    assert (wrong or "").startswith("kept") is (keeps or pair != "bounded"), wrong
    if pair == "llama" and keeps:
        result = growkit.verify(pairs / pair / "source", pairs / pair / "target", **QUICK)
        files = result.sections.files
        assert (files.changed, result.notes, files.unknown_files) == ([], [], [])


def test_the_study_sees_a_verdict_that_is_blind(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the study: a proof that compares nothing but logits does not pass it."""
    monkeypatch.setattr("growkit.proof.verdict.compare_folders", lambda *_: FolderDifferences())
    spoil = added("notes.txt")
    case = Tampering("a file", "rest", spoil), "llama", True, 0
    assert (tried(case, pairs, tmp_path) or "").startswith("kept")
