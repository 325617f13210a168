"""Files in and out: what is written is what safetensors and transformers read."""

import ast
import hashlib
import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint import writing
from growkit.model.checkpoint.writing import parse_bytes
from tests.files import edit_weights, folder_bytes
from tests.models import Make, relative_error, seeded


def test_shards_hold_no_more_than_asked(make: Make, tmp_path: Path) -> None:
    source = make("llama", tie_word_embeddings=True)
    growkit.grow(source, tmp_path / "one", hidden="x2", verify=None)
    growkit.grow(source, tmp_path / "many", hidden="x2", shard_size="10KB", verify=None)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    shards = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 10_000 or len(tensors) == 1
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == shard.name
            assert tensor.equal(whole[name])
    assert relative_error(source, tmp_path / "many") < 1e-12


def test_writing_leaves_torch_its_threads(make: Make, tmp_path: Path) -> None:
    """Workers take one thread each; the proof and the caller's own work afterwards do not."""
    found: list[int] = []
    torch.set_num_threads(3)
    try:
        growkit.grow(make("llama"), tmp_path / "out", hidden="x2", verify=False)
        found.append(torch.get_num_threads())
        worker = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        worker.start()
        worker.join()
    finally:
        torch.set_num_threads(1)
    assert found == [3, 3]


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_hashes_follow_the_writing_of_files(
    form: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors written in any order; the control is a file that is hashed too early."""
    write, chance = writing._write_tensor, seeded(3)

    def slowly(*arguments: Any) -> None:
        time.sleep(chance.random() / 100)
        write(*arguments)

    monkeypatch.setattr(writing, "_write_tensor", slowly)
    steps = (growkit.GrowStep("hypercloning", {"hidden": "x2"}),)
    recipe = growkit.Recipe(str(make("llama")), steps, str(tmp_path / "out"), None, format=form)
    growkit.run(recipe)
    assert growkit.check(tmp_path / "out")["whole"]
    monkeypatch.setattr(writing._Written, "beyond", lambda *_: sys.maxsize)
    growkit.run(replace(recipe, output=str(tmp_path / "early")))
    assert not growkit.check(tmp_path / "early")["whole"]


def test_tensors_begin_at_multiples_of_their_element_size(make: Make, tmp_path: Path) -> None:
    source = make("llama", vocab_size=7)
    dtypes = [torch.bfloat16, torch.float64, torch.float32, torch.float16]
    with edit_weights(source) as mixed:
        mixed |= {name: t.to(dtypes[i % 4]) for i, (name, t) in enumerate(mixed.items())}
    growkit.grow(source, tmp_path / "target", ffn="x3", verify=None)
    written = tmp_path / "target" / "model.safetensors"
    raw = written.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % mixed[name].element_size() == 0
        assert load_file(written)[name].dtype == mixed[name].dtype
    assert relative_error(source, tmp_path / "target") < 1e-12


def test_a_tied_head_that_is_stored_again(make: Make, tmp_path: Path) -> None:
    """pytorch_model.bin of tied models holds the embedding under both names."""
    source = make("llama", tie_word_embeddings=True)
    with edit_weights(source) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=None)
    assert result["dropped"] == {
        "lm_head.weight": "tied to model.embed_tokens.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "the model class computes it",
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.lm_head.weight is model.model.embed_tokens.weight

    with edit_weights(source) as tensors:
        tensors["lm_head.weight"][0, 0] += 1
    for dry_run in (True, False):
        with pytest.raises(InputError, match=r"lm_head\.weight.*differs from the embedding"):
            growkit.grow(source, tmp_path / "other", hidden="x2", verify=None, dry_run=dry_run)
    assert not (tmp_path / "other").exists()


def vocabulary_files() -> set[str]:
    """The names of all files that transformers' tokenizers read."""
    files = Path(transformers.__file__).parent.glob("models/*/tokenization_*.py")
    found = (re.search(r"^VOCAB_FILES_NAMES = ({.*?})", f.read_text(), re.S | re.M) for f in files)
    names = {name for each in found if each for name in ast.literal_eval(each[1]).values()}
    assert len(names) > 15
    return names


def test_what_is_carried_over(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    carried = {"chat_template.jinja": "{{ messages }}", "merges.txt": "", "LICENSE.txt": "terms"}
    carried |= dict.fromkeys(("tokenizer.json", "special_tokens_map.json", "vocab.json"), "{}")
    carried |= dict.fromkeys({*vocabulary_files(), "vocab.bin", "own.data"}, "{}")
    carried |= {"tokenization_own.py": 'from .tools import READ\nFILE = "vocab.bin"'}
    carried |= {"tools.py": "FILES = ['model.safetensors', 'own.data']", "License.md": "terms"}
    carried["tokenizer_config.json"] = (
        '{"auto_map": {"AutoTokenizer": ["tokenization_own.A", null]}}'
    )
    left = {"optimizer.pt": "x", "README.md": "old card", "training_args.bin": "x", "notes": "x"}
    left |= {"train.py": "from .tools import READ"}
    for name, text in (carried | left).items():
        (source / name).write_text(text)
    before = folder_bytes(source)
    growkit.grow(source, tmp_path / "target", hidden="x2", verify=None)
    after = folder_bytes(tmp_path / "target")
    for name, text in carried.items():
        assert after[name].decode() == text
    assert after["generation_config.json"] == before["generation_config.json"]
    own = {"README.md", "config.json", "generation_config.json", "growkit.json"}
    assert set(after) == {*carried, *own, "model.safetensors"}
    assert b"old card" not in after["README.md"]
    assert folder_bytes(source) == before
    for _ in ("with", "without"):
        verdict = growkit.verify(source, tmp_path / "target", prompts=1, length=8)
        assert verdict.kept, verdict.reason
        (tmp_path / "target" / "growkit.json").unlink(missing_ok=True)
    (tmp_path / "target" / "tools.py").write_text("other")
    assert not growkit.verify(source, tmp_path / "target", prompts=1, length=8).kept


def test_the_manifest_names_what_the_model_was_made_from(make: Make, tmp_path: Path) -> None:
    source = make("llama", shard_size="6KB")
    growkit.grow(source, tmp_path / "target", hidden="x2", ffn="x3", seed=7, verify=None)
    manifest = json.loads((tmp_path / "target" / "growkit.json").read_text())
    step = {"grow": "hypercloning", "hidden": "x2", "ffn": "x3"}
    assert manifest["recipe"]["steps"] == [step | {"symmetry": "break", "snr_db": 10.0}]
    assert manifest["recipe"]["seed"] == 7
    assert (manifest["kept"], manifest["verification"]) == (None, None)
    files = {*source.glob("*.safetensors"), source / "config.json"}
    assert manifest["source_files"] == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


@pytest.mark.parametrize(("text", "size"), [("5gb", 5 * 10**9), ("1.5 KB", 1500)])
def test_sizes_of_files(text: str, size: int) -> None:
    assert parse_bytes(text) == size
