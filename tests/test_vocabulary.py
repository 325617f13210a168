"""Models with fewer tokens: the classes and the tokenizers of transformers judge what is left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import growkit
from growkit.cli.demo import held_out_text
from growkit.extras.shrinking import tokenizer
from growkit.extras.shrinking.reductions import vocabulary
from tests import architectures
from tests.commands import cli, refusal
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import (
    distance,
    load_strict,
    logits_of,
    relative_error,
    same_bits,
    save_model,
)

QUICK = growkit.Settings(prompts=2, length=24)
CORPUS = [*held_out_text().split("\n\n"), "naïve café — 数字, and so on and on", "x + y = 42 " * 9]
DOCUMENTS = [*CORPUS[:3], *CORPUS[-2:], "    indented, and so on "]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
SIZE = 400

WORDS = pre_tokenizers.Split(r" ?\w+| ?[^\s\w]+|\s+", "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPACES = pre_tokenizers.Metaspace(prepend_scheme="first")
ALL_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**more: Any) -> Tokenizer:
    """BPE of bytes, as GPT-2 and Llama 3 have it."""
    made = Tokenizer(models.BPE(**more))
    made.pre_tokenizer = pre_tokenizers.Sequence([WORDS, BYTES])
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(
        vocab_size=SIZE + 200, special_tokens=SPECIAL, initial_alphabet=letters
    )
    made.train_from_iterator(CORPUS, learn)
    return made


def byte_fallback() -> Tokenizer:
    """BPE of characters, with bytes for those that it does not know, as Llama 2 has it."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = SPACES
    made.decoder = decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
    )
    learn = trainers.BpeTrainer(
        vocab_size=SIZE + 200, special_tokens=[*SPECIAL, *ALL_BYTES], limit_alphabet=50
    )
    made.train_from_iterator(CORPUS, learn)
    return made


def with_affixes(**affixes: str) -> Tokenizer:
    """BPE that marks pieces inside of words, or at their ends, as CLIP has it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", **affixes))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    learn = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, **affixes)
    made.train_from_iterator(CORPUS, learn)
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), SPACES
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    learn = trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=SPECIAL, unk_token="<unk>")
    made.train_from_iterator(CORPUS, learn)
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=SPECIAL)
    )
    return made


TOKENIZERS = {
    "bpe": byte_level,
    "byte-fallback": byte_fallback,
    "bpe-prefix": lambda: with_affixes(continuing_subword_prefix="##"),
    "bpe-suffix": lambda: with_affixes(end_of_word_suffix="</w>"),
    "unigram": unigram,
    "word-piece": word_piece,
    "tiktoken": lambda: byte_level(ignore_merges=True),
}


CLASSES = {"bpe": "GPT2", "byte-fallback": "Llama", "unigram": "XLMRoberta", "word-piece": "Bert"}
"""The classes as which transformers loads them; those of two kinds add a token for masks."""


def with_tokenizer(folder: Path, kind: str, *, tied: bool = False) -> Path:
    """A tiny Llama with a tokenizer of a kind, which puts a token before each text."""
    made = TOKENIZERS[kind]()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    tokens = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    ids = {f"{name}_id": made.token_to_id(token) for name, token in tokens.items()}
    del ids["unk_token_id"]
    count = made.get_vocab_size() + 8  # rows without a token
    save_model(folder, "llama", vocab_size=count, tie_word_embeddings=tied, **ids)
    ends = [ids["eos_token_id"], SIZE - 9]  # a token that takes merges
    GenerationConfig(**ids | {"eos_token_id": ends}).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(folder)
    with edit_json(folder / "tokenizer_config.json") as settings:
        named = CLASSES.get(kind)
        settings["tokenizer_class"] = f"{named}Tokenizer" if named else "PreTrainedTokenizerFast"
    return folder


def with_token_beyond(folder: Path) -> Path:
    """As in Gemma 3 for text, a token is added for which the model has no row."""
    with edit_json(folder / "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"].append(
            tokenizer["added_tokens"][-1] | {"id": 999, "content": "<image>"}
        )
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_left_keeps_its_logits_and_its_pieces(kind: str, tmp_path: Path) -> None:
    tied = kind in ("byte-fallback", "word-piece")
    source = with_tokenizer(tmp_path / "source", kind, tied=tied)
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("<|endoftext|>".join(DOCUMENTS), "utf-8")
    settings = growkit.Settings(text=str(text), prompts=2, length=24)
    result = growkit.shrink(source, out, vocab_of=text, verify=settings)
    assert result["kept"], result["verification"]["reason"]
    assert not result["warnings"]
    was, now = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert len(now) < len(was)
    for document in DOCUMENTS:
        pieces = [t.convert_ids_to_tokens(t(document)["input_ids"]) for t in (was, now)]
        assert pieces[0] == pieces[1], document
    kept = [
        was.get_vocab()[token]
        for token, _ in sorted(now.get_vocab().items(), key=lambda pair: pair[1])
    ]
    before, after = (load_strict(folder) for folder in (source, out))
    ids = torch.randint(len(kept), (1, 24), generator=torch.Generator().manual_seed(0))
    expected = logits_of(before, torch.tensor(kept)[ids])[:, kept]
    assert distance(expected, logits_of(after, ids)) < 1e-12
    rows = [
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (source, out)
    ]
    assert rows[0][kept].equal(rows[1])
    for one, other in (
        (before.config, after.config),
        (before.generation_config, after.generation_config),
    ):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert was.convert_ids_to_tokens(getattr(one, key)) == now.convert_ids_to_tokens(
                getattr(other, key)
            )


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with the tokens alone that some documents use."""
    place = tmp_path_factory.mktemp("vocabulary")
    source, text = with_token_beyond(with_tokenizer(place / "source", "bpe")), place / "text"
    text.write_text("<|endoftext|>".join(DOCUMENTS), "utf-8")
    result = growkit.shrink(source, place / "out", vocab_of=text, verify=QUICK)
    assert result["kept"]
    assert "of its softmax" in result["verification"]["reason"]
    return source, place / "out"


def spoil_merges(out: Path) -> str:
    with edit_json(out / "tokenizer.json") as tokenizer:
        tokenizer["model"]["merges"].pop()
    return "tokenizer.json"


def spoil_ids(out: Path) -> str:
    with edit_json(out / "generation_config.json") as settings:
        settings["eos_token_id"][0] += 1
    return "eos_token_id"


def spoil_weights(out: Path) -> str:
    with edit_weights(out) as weights:
        weights["lm_head.weight"][[1, 2]] = weights["lm_head.weight"][[2, 1]]
    return "lm_head.weight"


@pytest.mark.parametrize("spoil", [spoil_merges, spoil_ids, spoil_weights])
def test_a_fault_in_what_is_left_is_noticed(
    spoil: Callable[[Path], str], trimmed: tuple[Path, Path], tmp_path: Path
) -> None:
    source, out = trimmed
    copied = shutil.copytree(out, tmp_path / "out")
    named = spoil(copied)
    verdict = growkit.verify(source, copied, QUICK)
    assert not verdict["kept"]
    assert named in verdict["reason"]


def test_the_plan_says_what_is_encoded_otherwise(
    trimmed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = trimmed
    options: dict[str, Any] = {"vocab_of": source.parent / "text", "dry_run": True}
    assert not growkit.shrink(source, tmp_path / "out", **options)["warnings"]
    monkeypatch.setattr(vocabulary, "MAX_TEXT", 600)
    monkeypatch.setattr(tokenizer, "_on_the_way", lambda *args: set())
    result = growkit.shrink(source, tmp_path / "out", **options)
    assert "documents of the text are encoded in other pieces" in result["warnings"][0]
    assert result["warnings"][1] == "only the tokens of the first 600 bytes of the text are kept"


def test_tokens_are_named_by_ids_or_by_their_spelling(
    trimmed: tuple[Path, Path], tmp_path: Path
) -> None:
    source, out = trimmed
    listed, again = tmp_path / "tokens", tmp_path / "again"
    listed.write_text("\n".join(AutoTokenizer.from_pretrained(out).get_vocab()), "utf-8")
    assert cli("shrink", source, again, "--vocab", listed, "--no-verify").exit_code == 0
    steps = [
        json.loads((each / "growkit.json").read_text())["recipe"]["steps"] for each in (out, again)
    ]
    assert steps[0] == steps[1]
    assert [*steps[0][0]] == ["shrink", "ids"]  # no path of a text
    listed.write_text("no such token", "utf-8")
    assert "'no such token'" in refusal("shrink", source, tmp_path / "out", "--vocab", listed)
    assert "numbers below" in refusal("shrink", source, tmp_path / "out", "--ids", "0-99999")
    assert "in one way" in refusal(
        "shrink", source, tmp_path / "out", "--ids", 1, "--vocab", listed
    )


def test_new_tokens_are_left_out_again(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    grown, back = tmp_path / "grown", tmp_path / "back"
    growkit.grow(source, grown, vocab=40, hidden="x2", untie=None, verify=False)
    result = growkit.shrink(grown, back, verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert all(same_bits(before[name], after[name]) for name in before.keys() | after.keys())


@pytest.mark.sampled(1, "roberta-gone3-reads more of an id than a row")
@pytest.mark.parametrize(("kind", "gone", "reason"), listed("vocabulary", "ids in classes"))
def test_what_a_class_reads_of_ids_is_left_or_refused(
    kind: str, gone: list[int], reason: str, tmp_path: Path
) -> None:
    source, out = architectures.save(kind, tmp_path / "source"), tmp_path / "out"
    count, model = 64, load_strict(source)
    kept = [number for number in range(count) if number not in gone]
    words = Tokenizer(models.WordLevel({f"word{at}": at for at in range(count)}, "word1"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    edit_config(source, bos_token_id=None, eos_token_id=None)
    ids = ",".join(map(str, kept))
    result = growkit.shrink(source, out, ids=ids, verify=QUICK)
    assert result["kept"] == (not reason), result["verification"]["reason"]
    assert reason in result["verification"]["reason"]
    if not reason:
        asked = torch.randint(len(kept), (1, 24), generator=torch.Generator().manual_seed(0))
        found = logits_of(load_strict(out), asked)
        expected = logits_of(model, torch.tensor(kept)[asked])[:, kept[: found.shape[1]]]
        assert distance(expected, found) < 1e-12


@pytest.mark.parametrize("trims", [["0-19,35"], ["3-19", "0-5,30"]])
def test_tokens_that_a_step_added_may_be_left(trims: list[str], tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    words = Tokenizer(models.WordLevel({f"word{at}": at for at in range(29)}, "word3"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    *first, last = (growkit.ShrinkStep("vocabulary", ids=ids) for ids in trims)
    steps = (*first, growkit.GrowStep("hypercloning", vocab=40, hidden="x2"), last)
    result = growkit.run(growkit.Recipe(str(source), steps, str(out), QUICK))
    assert result["kept"], result["verification"]["reason"]
    kept = [*range(20)] if len(trims) == 1 else [3, 4, 5, 6, 7, 8]
    left = AutoTokenizer.from_pretrained(out).get_vocab()
    assert left == {f"word{number}": at for at, number in enumerate(kept)}
    ids = torch.arange(len(kept))[None]
    expected = logits_of(load_strict(source), torch.tensor([kept]))[:, kept]
    assert distance(expected, logits_of(load_strict(out), ids)[:, : len(kept)]) < 1e-12
    with edit_weights(out) as weights:
        weights["lm_head.weight"][[1, 2]] = weights["lm_head.weight"][[2, 1]]
    assert not growkit.verify(source, out, QUICK)["kept"]  # the control


def test_a_text_is_read_with_the_tokens_that_are_left(tmp_path: Path) -> None:
    source, text = with_tokenizer(tmp_path / "source", "bpe"), tmp_path / "text"
    text.write_text("<|endoftext|>".join(DOCUMENTS), "utf-8")
    options = {"rank": "10", "calibration": str(text)}
    compress = growkit.ConvertStep("mla", options)
    trim = growkit.ShrinkStep("vocabulary", vocab_of=str(text))
    for steps, out in (((trim, compress), "first"), ((compress, trim), "last")):
        growkit.run(growkit.Recipe(str(source), steps, str(tmp_path / out), None))
    assert relative_error(tmp_path / "first", tmp_path / "last") < 1e-12


def test_tokens_are_left_out_of_what_is_rounded(trimmed: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = trimmed[0], tmp_path / "out"
    result = growkit.shrink(source, out, ids="0-300", dtype="bfloat16", verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    spoil_weights(out)
    assert not growkit.verify(source, out, QUICK)["kept"]  # the control


@pytest.mark.sampled(1, "apertus1p5_text")
@pytest.mark.parametrize("kind", ["gemma4_text", "apertus1p5_text"])
def test_new_tokens_have_rows_in_all_tables(kind: str, tmp_path: Path) -> None:
    source, out = architectures.save(kind, tmp_path / "source"), tmp_path / "out"
    growkit.grow(source, out, vocab=77, verify=False)
    assert relative_error(source, out) < 1e-12
    assert logits_of(load_strict(out), torch.tensor([[1, 70]])).isfinite().all()
    with pytest.raises(IndexError):  # the control
        logits_of(load_strict(source), torch.tensor([[1, 70]]))


def test_a_manifest_makes_no_proof_read_a_text(trimmed: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = trimmed
    copied, text = shutil.copytree(out, tmp_path / "out"), str(source.parent / "text")
    with edit_json(copied / "growkit.json") as manifest:
        manifest["recipe"]["steps"] = [{"shrink": "vocabulary", "vocab_of": text}]
    assert "only a target may have more tokens" in refusal("verify", source, copied)
