"""Manifests and descriptions of families that lie: no lie is preserved without being named.

A manifest's hashes are written again after every lie, so it is consistent in itself. What is still
preserved must behave as its source.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint.publishing import MANIFEST, write_manifest
from growkit.proof.files import FolderDifferences
from tests.architectures import save
from tests.families import FAMILIES, IDENTITY, Case, windows
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import KINDS, save_random, seeded
from tests.test_tampering import (
    TAMPERINGS,
    add_tokenizer,
    change_the_last_bit,
    in_weights,
    scale_a_matrix,
)

TEXTS = ("The Cat sat.  On\ta mat!", "def f(x):\n    return x + 1", "Ünï çødé <s> </s> [INST]", "")
CLOSE = 1e-8
"""Of the logit scale: far above rounding in float64."""

LONGEST = 400
GENERATED = 24
SAVING_KEYS = {"_from_model_config", "transformers_version"}


def difference(source: Path, target: Path, rounding: float = 0.0) -> str | None:
    """In what a target behaves otherwise than its source; None where nothing was found.

    Args:
        source: a folder.
        target: another.
        rounding: what logits differ by where classes compute in float32 whatever their weights are.
    """
    return next(_differences(source, target, max(CLOSE, 10 * rounding)), None)


def rounding(source: Path, target: Path) -> float:
    """The largest difference of logits of two folders that are sound, relative to their scale."""
    first, second = (_load(folder) for folder in (source, target))
    longest = min(_longest(first), LONGEST)
    return max(_error(first, second, each) for each in prompts(first.config.vocab_size, longest))


def _differences(source: Path, target: Path, alike: float) -> Iterator[str]:
    try:
        models = [_load(folder) for folder in (source, target)]
    except Exception as error:  # whatever a class says of a config
        yield f"it does not load: {error}"
        return
    first, second = models
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        was, now = (getattr(model.config, key, None) for model in models)
        if was != now:
            yield f"{key} {was} and {now}"
    yield from _generation(*models)
    longest = min(_longest(first), LONGEST)
    for ids in prompts(first.config.vocab_size, longest):
        error = _error(first, second, ids)
        if not error < alike:
            yield f"logits of {ids.shape[-1]} tokens by {error:.1e}"
    was, now = (_greedy(model) for model in models)
    if was != now:
        yield f"greedy text {was} and {now}"
    yield from _tokenizers(source, target)
    was, now = (_dtype(folder) for folder in (source, target))
    if torch.finfo(now).bits < torch.finfo(was).bits:
        yield f"dtype {was} and {now}"


def prompts(vocabulary: int, longest: int) -> Iterator[torch.Tensor]:
    """Every token once; and one prompt as long as there may be."""
    generator = torch.Generator().manual_seed(5)
    yield torch.randint(vocabulary, (1, longest), generator=generator)
    for part in torch.randperm(vocabulary, generator=generator).split(min(longest, 100)):
        yield part[None]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _dtype(folder: Path) -> torch.dtype:
    dtype: torch.dtype = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    return dtype


def _longest(model: Any) -> int:
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else LONGEST


def _error(first: Any, second: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        was = first(ids, use_cache=False).logits
        try:
            now = second(ids, use_cache=False).logits[..., : was.shape[-1]]
        except Exception:  # of a table that is too short, say
            return float("inf")
    return float((was - now).abs().max() / was.square().mean().sqrt())


def _greedy(model: Any) -> list[int] | str:
    ids = torch.arange(3, 9)[None] % model.config.vocab_size
    try:
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GENERATED
        )
    except Exception as error:  # of settings that cannot be, and then of both
        return type(error).__name__
    found: list[int] = text[0].tolist()
    return found


def _generation(first: Any, second: Any) -> Iterator[str]:
    was, now = (model.generation_config.to_dict() for model in (first, second))
    for key in sorted((was.keys() | now.keys()) - SAVING_KEYS):
        if was.get(key) != now.get(key):
            yield f"{key} of generation {was.get(key)} and {now.get(key)}"


def _tokenizers(source: Path, target: Path) -> Iterator[str]:
    if not any((folder / "tokenizer.json").exists() for folder in (source, target)):
        return
    try:
        was, now = (AutoTokenizer.from_pretrained(folder) for folder in (source, target))
    except Exception as error:
        yield f"the tokenizer does not load: {error}"
        return
    for name, ask in ASKED.items():
        one, other = (_answers(ask, each) for each in (was, now))
        if one != other:
            yield f"{name} of the tokenizer {one!r:.80} and {other!r:.80}"


def _answers(ask: Any, tokenizer: Any) -> Any:
    try:
        return ask(tokenizer)
    except Exception as error:
        return type(error).__name__


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
ASKED = {
    "ids": lambda t: [t(text).input_ids for text in TEXTS],
    "ids without special tokens": lambda t: [t.encode(x, add_special_tokens=False) for x in TEXTS],
    "cut ids": lambda t: [t(text * 40, truncation=True, max_length=9).input_ids for text in TEXTS],
    "text": lambda t: t.decode(list(range(3, 200))),
    "text without special tokens": lambda t: t.decode(range(200), skip_special_tokens=True),
    "chat": lambda t: t.apply_chat_template(CHAT, tokenize=False),
    "special tokens": lambda t: (t.special_tokens_map, t.all_special_ids),
    "length": lambda t: t.model_max_length,
    "sides": lambda t: (t.padding_side, t.truncation_side),
    "padding": lambda t: t(list(TEXTS), padding=True).input_ids,
}


Json = dict[str, Any]
QUICK: Json = {"prompts": 1, "length": 10}
VOCABULARY = 300
CONVERTED = {
    "diffllama": ("dint", "diff-transformer", "gda"),
    "llama": ("diff", "diff-v2", "granite", "mistral", "diff-transformer"),
    "qwen2": ("diff", "diff-v2"),
    "qwen3": ("diff",),
    "granite": ("diff",),
}
DESCRIBED = ("arcee", "cwm", "exaone4", "seed_oss")
"""Types of which growkit has no family; some with windows."""

COMMON: Json = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
COMMON |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}


# Sound pairs


@dataclass(frozen=True)
class Pair:
    """A source, and a target that growkit made of it.

    Attributes:
        folder: of both.
        kind: ``model_type`` of the source.
        way: how it was made.
        family: what describes its family, if growkit has none.
    """

    folder: Path
    kind: str
    way: str
    family: Json | None

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def target(self) -> Path:
        return self.folder / "target"


def ways() -> list[tuple[str, str]]:
    """Everything that is done to a type."""
    found = [(kind, way) for kind in FAMILIES for way in ("sizes", "depth", "vocab")]
    found += [(kind, way) for kind in KINDS for way in ("sizes", "depth", "vocab")]
    found += [(kind, f"to {name}") for kind, names in CONVERTED.items() for name in names]
    return found + [(kind, way) for kind in DESCRIBED for way in ("sizes", "depth", "vocab")]


def make_pair(kind: str, way: str, folder: Path) -> Pair:
    """A random source with a tokenizer, grown; the proof holds."""
    choose = seeded(sum(map(ord, kind + way)))
    family = None
    grown: Json = {"hidden": "x2"}
    if kind in DESCRIBED:
        save(kind, folder / "source", **more_of(kind, choose))
        family = growkit.infer(folder / "source")["family"]
    elif kind in FAMILIES:
        case = Case(FAMILIES[kind], choose)
        switches = {key: on for key, on in IDENTITY.items() if key in case.config}
        save_random(folder / "source", CONFIG_MAPPING[kind](**(case.config | COMMON | switches)))
        grown = case.sizes
    else:
        save_random(folder / "source", CONFIG_MAPPING[kind](**more_of(kind, choose)))
    grown = {"depth": {"method": "depth", "layers": "x2"}, "vocab": {"vocab": 310}}.get(way, grown)
    if kind != "qwen2":  # whose tokenizer transformers makes another one of for other types
        add_tokenizer(folder / "source")
    pair = Pair(folder, kind, way, family)
    settings = growkit.Settings(**QUICK)
    if way.startswith("to "):
        made = growkit.convert(pair.source, pair.target, to=way[3:], verify=settings)
    else:
        made = growkit.grow(pair.source, pair.target, family=family, verify=settings, **grown)
    assert made["kept"], made["verification"]
    return pair


def more_of(kind: str, choose: random.Random) -> Json:
    """Other keys of a type: sizes that may be taken for settings, and windows."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 4}
    known = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}
    if "layer_types" in known and (kind in DESCRIBED or kind not in CONVERTED):
        sizes |= windows(choose)
    if kind == "mistral":
        sizes["sliding_window"] = 24
    if kind == "diff_transformer":
        sizes["num_noise_heads"] = 2
    return sizes | COMMON


# Lies


Lie = Callable[[Pair, Path, random.Random], str]


def other(value: Any, choose: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return choose.choice([value + 1, max(value - 1, 0), 2 * value + 1, value // 2, None])
    if isinstance(value, float):
        return choose.choice([value * 2, value / 2, value + 0.1, 0.0])
    if isinstance(value, list) and value:
        return choose.choice([value[::-1], value[:-1], [value[0]] * len(value), value * 2])
    if isinstance(value, dict) and value:
        key = choose.choice(sorted(value))
        return value | {key: other(value[key], choose)}
    if value is None:
        return choose.choice([1, 3, 7, 24])
    return choose.choice(["gelu", "relu", "silu", "bfloat16", "float16", "dynamic", "linear"])


SETTLED = ("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map")
SETTINGS: list[tuple[str, Any]] = listed("manifests", "settings")
"""Settings that long prompts show."""


def key_of(folder: Path, choose: random.Random) -> tuple[str, Any]:
    """A key of a config, written or assumed, and its value."""
    resolved = AutoConfig.from_pretrained(folder).to_dict()
    key = choose.choice(sorted(resolved.keys() - {*SETTLED}))
    return key, resolved[key]


def a_setting(pair: Pair, folder: Path, choose: random.Random) -> str:
    key, value = key_of(folder, choose)
    with edit_json(folder / "config.json") as config:
        config[key] = other(value, choose)
    return key


def a_known_setting(pair: Pair, folder: Path, choose: random.Random) -> str:
    key, value = choose.choice(SETTINGS)
    with edit_json(folder / "config.json") as config:
        config[key] = value
        if key == "layer_types":
            count = AutoConfig.from_pretrained(pair.target).num_hidden_layers
            config[key] = (value * count)[:count]
            config.setdefault("sliding_window", 12)
    return key


def a_setting_left_out(pair: Pair, folder: Path, choose: random.Random) -> str:
    with edit_json(folder / "config.json") as config:
        key = choose.choice(sorted(config.keys() - {*SETTLED}))
        del config[key]
    return key


def weights_in_another_dtype(pair: Pair, folder: Path, choose: random.Random) -> str:
    dtype = choose.choice(["bfloat16", "float16"])
    with edit_weights(folder) as content:
        content |= {name: each.to(getattr(torch, dtype)) for name, each in content.items()}
    for file, part in (("config.json", None), (MANIFEST, "recipe")):
        with edit_json(folder / file) as content_of:
            (content_of[part] if part else content_of)["dtype"] = dtype
    return "round"


def a_description(pair: Pair, folder: Path, choose: random.Random) -> str:
    """Settings that the manifest calls sizes, so that its recipe plans others."""
    try:
        family = pair.family or growkit.infer(pair.source)["family"]
    except (InputError, AssertionError):
        return a_setting(pair, folder, choose)
    key, value = key_of(folder, choose)
    axis = choose.choice(sorted({*family["sizes"].values()}))
    way = choose.choice(["sizes", "sizes", "assumed", "lists", "computed"])
    if way in ("sizes", "assumed"):
        added = axis if way == "sizes" else other(value, choose)
        family[way] = {**family.get(way, {}), key: added}
    else:
        family[way] = [*family.get(way, []), key]
    with edit_json(folder / MANIFEST) as manifest:
        manifest["recipe"]["family"] = family
    with edit_json(folder / "config.json") as config:
        config[key] = 2 * value if type(value) is int else other(value, choose)
    return key


def a_recipe(pair: Pair, folder: Path, choose: random.Random) -> str:
    """One that does not fit, with another setting: all that is compared is the source's."""
    with edit_json(folder / MANIFEST) as manifest:
        manifest["recipe"]["steps"] = [{"grow": "hypercloning", "hidden": 7}]
    return choose.choice(SPOILS)(pair, folder, choose)


def no_manifest(pair: Pair, folder: Path, choose: random.Random) -> str:
    (folder / MANIFEST).unlink()
    return choose.choice(SPOILS)(pair, folder, choose)


def tampered(pair: Pair, folder: Path, choose: random.Random) -> str:
    """As in ``tests.test_tampering``, of a part that a manifest can record again."""
    spoils = [each.spoil for each in TAMPERINGS if each.part in ("tokenizer", "generation")]
    spoils += [in_weights(scale_a_matrix), in_weights(change_the_last_bit)]
    return choose.choice(spoils)(folder, choose)


SPOILS: list[Lie] = [a_setting, a_known_setting, a_setting_left_out]
LIES = [*SPOILS, weights_in_another_dtype, a_description, a_recipe, no_manifest, tampered]


def record(folder: Path) -> None:
    """Write all hashes of a manifest again, as growkit does."""
    if not (folder / MANIFEST).exists():
        return
    content = json.loads((folder / MANIFEST).read_text())
    rest = {key: value for key, value in content.items() if key not in ("files", "sha256")}
    (folder / MANIFEST).unlink()
    write_manifest(folder, rest, {})


# The study


@dataclass(frozen=True)
class Outcome:
    """What came of a lie: refused, seen, named, harmless or believed."""

    what: str
    said: str


def tried(pair: Pair, tell: Lie, seed: int, scratch: Path) -> Outcome:
    """Tell a lie of a copy of a target, and prove it."""
    choose = random.Random(seed)
    target = shutil.copytree(pair.target, scratch / "target")
    wanted = tell(pair, target, choose)
    record(target)
    try:
        result = growkit.verify(pair.source, target, **QUICK)
    except InputError as error:
        return Outcome("refused", str(error))
    said = f"{wanted}: {result['reason']}"
    if not result["kept"]:
        return Outcome("seen", said)
    if wanted in result["reason"]:
        return Outcome("named", said)
    found = difference(pair.source, target, rounding(pair.source, pair.target))
    return Outcome("believed", f"{found} | {said}") if found else Outcome("harmless", said)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("mistral", "sizes", tmp_path_factory.mktemp("pair"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(LIES)))
def test_no_lie_is_believed(number: int, pair: Pair, tmp_path: Path) -> None:
    outcome = tried(pair, LIES[number], number, tmp_path)
    assert outcome.what != "believed", outcome.said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(300))
def test_no_lie_about_any_family_is_believed(number: int, tmp_path: Path) -> None:
    every = ways()
    pair = make_pair(*every[number % len(every)], tmp_path / "pair")
    (tmp_path / "copy").mkdir()
    tell = LIES[number % len(LIES)]
    outcome = tried(pair, tell, number, tmp_path / "copy")
    assert outcome.what != "believed", outcome.said


def test_the_study_sees_a_verdict_that_is_blind(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the study: who compares short prompts alone believes another window."""
    monkeypatch.setattr("growkit.proof.verdict.compare_folders", lambda *_: FolderDifferences())

    def another_window(pair: Pair, folder: Path, choose: object) -> str:
        edit_config(folder, sliding_window=40)
        return "sliding_window"

    outcome = tried(pair, another_window, 0, tmp_path)
    assert outcome.what == "believed", outcome.said
    assert "logits" in outcome.said
