"""Files next to the weights, judged by transformers: the same tokens, and the same stops."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    BertTokenizer,
    LlamaTokenizer,
)

import growkit
from growkit.base.errors import InputError
from growkit.engine import prompts
from growkit.engine.prompts import PROBES, load_tokenizer
from growkit.model.checkpoint.scratch import temporary
from growkit.results.proof_result import VerifyResult
from tests.files import edit_config, edit_json
from tests.models import save_model
from tests.test_multimodal import save_whole

QUICK: dict[str, Any] = {"prompts": 1, "length": 8}


def both_ways(source: Path, target: Path) -> list[VerifyResult]:
    """The verdicts with the manifest that says how a target was made, and without it."""
    manifest = target / "growkit.json"
    first = growkit.verify(source, target, **QUICK)
    manifest.rename(target.parent / "kept.json")
    second = growkit.verify(source, target, **QUICK)
    (target.parent / "kept.json").rename(manifest)
    return [first, second]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
@pytest.mark.parametrize(
    "stops", [{"eos_token_id": [1, 5]}, {"eos_token_id": 7, "pad_token_id": 3, "max_length": 30}]
)
def test_a_language_model_stops_where_the_whole_does(
    kind: str, stops: dict[str, Any], tmp_path: Path
) -> None:
    source, out = save_whole(tmp_path / "source", kind), tmp_path / "out"
    (source / "generation_config.json").unlink(missing_ok=True)
    edit_config(source, **stops)
    assert growkit.grow(source, out, ffn="x2", verify=growkit.Settings(**QUICK)).kept
    whole = AutoModelForMultimodalLM.from_pretrained(source).generation_config
    alone = AutoModelForCausalLM.from_pretrained(out).generation_config
    made = {"_from_model_config", "transformers_version", "use_cache"}  # by default, it is true
    given, kept = (
        {k: v for k, v in each.to_dict().items() if k not in made} for each in (whole, alone)
    )
    assert given == kept
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == stops["eos_token_id"]
    assert all(verdict.kept for verdict in both_ways(source, out))
    for file in out.glob("*config.json"):
        edit_config(out, file.name, eos_token_id=2)
    assert not any(verdict.kept for verdict in both_ways(source, out))


def with_bytes(folder: Path, **settings: Any) -> Path:
    """The folder with a tokenizer of bytes, whose settings may name any class."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
    return folder


UPCYCLE = {"method": "upcycle", "experts": 2, "top_k": 2}


@pytest.mark.sampled(1, f"{UPCYCLE}-llama-BertTokenizer")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        *(("qwen2", name) for name in ("LlamaTokenizerFast", "GPT2Tokenizer", None)),
        *(("llama", name) for name in ("GPT2Tokenizer", "LlamaTokenizer", "BertTokenizer")),
    ],
)
@pytest.mark.parametrize("step", [UPCYCLE, {"to": "diff"}, {"to": "diff-v2"}], ids=str)
def test_the_tokenizer_stays_whatever_the_type(
    kind: str, named: str | None, step: dict[str, Any], tmp_path: Path
) -> None:
    """transformers corrects the class that the files of some types name, not those of others."""
    source, out = save_model(tmp_path / "source", kind, vocab_size=260), tmp_path / "out"
    with_bytes(source, tokenizer_class=named, eos_token="<s>", unk_token="<s>")
    if named == "LlamaTokenizer":  # whose defaults are not those of other classes
        words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
        vocabulary = {word: number for number, word in enumerate(words)}
        LlamaTokenizer(vocab=vocabulary, merges=[]).save_pretrained(source)
    if named == "BertTokenizer":  # which has rules of its own, whatever the file says
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##e", "##l"]
        vocabulary = {word: number for number, word in enumerate(words)}
        BertTokenizer(vocab=vocabulary).save_pretrained(source)
        with edit_json(source / "tokenizer.json") as rules:
            rules["normalizer"]["lowercase"] = False
    run: Any = growkit.convert if "to" in step else growkit.grow
    plan = run(source, out, dry_run=True, **step)
    result = run(source, out, verify=growkit.Settings(**QUICK), **step)
    assert result.kept, result.verification.reason
    assert plan.warnings == result.warnings
    before, after = (
        AutoTokenizer.from_pretrained(each, trust_remote_code=True) for each in (source, out)
    )
    assert [before(text).input_ids for text in PROBES] == [after(text).input_ids for text in PROBES]
    assert before.padding_side == after.padding_side
    assert before.model_input_names == after.model_input_names
    assert all(verdict.kept for verdict in both_ways(source, out))


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    (source / "tokenizer.model").write_bytes(bytes(range(100)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "find_spec", lambda name: None)
        with pytest.raises(InputError, match="pip install sentencepiece tiktoken"):
            load_tokenizer(source)
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}')
    with pytest.raises(InputError, match="does not run the code of tokenizers"):
        load_tokenizer(source)


def test_messages_name_no_temporary_folders(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    auto_map = {"AutoTokenizer": ["tokenization_own.Own", None]}
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (source / "tokenization_own.py").write_text("class Own: pass")
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=growkit.Settings(**QUICK))
    assert f"the code in {tmp_path / 'out'} (tokenizer_config.json" in result.verification.reason
    assert "/.out." not in json.dumps(result)
    with pytest.raises(InputError) as error, temporary("reload") as folder:
        raise InputError(f"{folder / 'config.json'} differs, and {folder} goes")
    assert str(error.value) == "config.json differs, and the saved copy goes"
