"""Without a manifest the verdict says what it rests on, and no setting differs unnoticed."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

import growkit
from growkit.base.errors import InputError
from growkit.engine import recipe_planning
from growkit.engine.loader import loading
from growkit.engine.transformers_class import resolved
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.manifest import read_record
from growkit.proof.config_comparison import different_settings, in_order, judge
from growkit.proof.files import compare_with_plan, compare_with_source
from growkit.proof.modes import LONGEST
from growkit.proof.weights import lineage_of
from tests.architectures import KINDS, save
from tests.commands import cli
from tests.families import MOE
from tests.files import edit_config, edit_json, edit_weights, listed, with_tokenizer
from tests.models import Make, save_model

QUICK: dict[str, Any] = {"prompts": 1, "length": 10}
DECIDING = listed("without_manifest", "a setting that no prompt shows")
JUDGED = listed("without_manifest", "a setting that logits judge, or without effect")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "llama", vocab_size=256, eos_token_id=2)
    with_tokenizer(source)
    growkit.grow(source, folder / "target", hidden="x2", verify=False)
    (folder / "target" / "growkit.json").unlink()
    return source


@pytest.fixture
def target(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source.with_name("target"), tmp_path / "target")


def found(source: Path, target: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    checkpoints = Checkpoint(source), Checkpoint(target)
    beside = compare_with_source(*checkpoints)
    return tuple(beside.changed), tuple(beside.named)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("key", "value"), [*DECIDING, *JUDGED])
def test_a_setting_that_no_prompt_shows(key: str, value: Any, source: Path, target: Path) -> None:
    assert found(source, target) == ((), ())
    edit_config(target, **{key: value})
    changed, named = found(source, target)
    if [key, value] in JUDGED:
        assert changed == ()
        assert named[0].startswith(f"{key} in config.json differs")
        return
    assert f"{key} in config.json" in changed
    if key == "max_position_embeddings":
        result = growkit.verify(source, target, **QUICK)
        assert not result["kept"]
        assert f"{key} in config.json is not what it is in the source" in result["reason"]
        expected = result.sections.files.changed_values[0].expected
        assert f"({value} in place of {expected})" in result["reason"]


def test_a_list_of_one_token_is_this_token(source: Path, target: Path) -> None:
    for ids, same in (([2], True), ([3], False), ([2, 3], False)):
        for name in ("config.json", "generation_config.json"):
            edit_config(target, name, eos_token_id=ids)
        assert (found(source, target) == ((), ())) is same


def test_a_class_that_only_the_target_names(source: Path, target: Path, tmp_path: Path) -> None:
    """Other engines look for it; transformers reads no class there."""
    unnamed = shutil.copytree(source, tmp_path / "unnamed")
    edit_config(unnamed, architectures=None)
    assert found(unnamed, target) == ((), ())
    edit_config(target, architectures=["EvilForCausalLM"])
    assert "architectures in config.json" in found(unnamed, target)[0]


@pytest.mark.parametrize(
    ("key", "size"), [("block_dim", "hidden_size"), ("mlp_dim", "intermediate_size")]
)
def test_sizes_that_the_publisher_repeats(
    key: str, size: str, source: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(source, tmp_path / "source")
    edit_config(source, **{key: Checkpoint(source).config[size]})
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    (tmp_path / "out" / "growkit.json").unlink()
    assert found(source, tmp_path / "out") == ((), ())
    edit_config(tmp_path / "out", **{key: 7})
    changed, _ = found(source, tmp_path / "out")
    assert any(key in each for each in changed)


@pytest.mark.parametrize("to", ["diff-v2", "llama"])
def test_conversions_are_no_false_alarms(to: str, make: Make, tmp_path: Path) -> None:
    source = make("mistral" if to == "llama" else "llama", vocab_size=256)
    if to == "llama":
        edit_config(source, sliding_window=None)
    growkit.convert(with_tokenizer(source), tmp_path / "target", to=to, verify=False)
    (tmp_path / "target" / "growkit.json").unlink()
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["kept"], result["reason"]
    assert "only keys with the same meaning in both classes" in result["reason"]


def test_what_only_others_do_with_a_tokenizer_is_named(source: Path, target: Path) -> None:
    """transformers cuts nothing unless it is told to; who reads the file by itself does."""
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit_config(target, "tokenizer.json", truncation=cut)
    (target / "tekken.json").write_text("{}")
    result = growkit.verify(source, target, **QUICK)
    assert result["kept"]
    assert result.sections.weights.recovered is None
    assert "weights were not compared, because no manifest records how" in result["reason"]
    assert "not byte by byte: tokenizer.json" in result["reason"]
    assert result.sections.files.unknown_files == ["tekken.json"]


BESIDE: dict[str, tuple[str, dict[str, Any] | str | None]] = listed("without_manifest", "files")


@pytest.fixture(scope="module")
def with_files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with files that prompts do not show, and what was grown from it."""
    again = shutil.copytree(source, tmp_path_factory.mktemp("files") / "source")
    (again / "preprocessor_config.json").write_text('{"size": 224}')
    (again / "generation_config.json").write_text('{"eos_token_id": [2, 3], "top_k": 5}')
    for name in ("LICENSE", "chat_template.jinja"):
        (again / name).write_text("one")
    growkit.grow(again, again.with_name("out"), ffn="x2", verify=False)
    return again, again.with_name("out")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("said", BESIDE)
def test_files_beside_the_weights_decide_as_with_a_manifest(
    said: str, with_files: tuple[Path, Path], tmp_path: Path
) -> None:
    (name, content), (source, grown) = BESIDE[said], with_files
    target = shutil.copytree(grown, tmp_path / "out")
    if content is None:
        (target / name).unlink()
    elif isinstance(content, dict):
        edit_config(target, name, **content)
    else:
        (target / name).write_text(content)
    for manifest in (True, False):
        if not manifest:
            (target / "growkit.json").unlink()
        result = growkit.verify(source, target, **QUICK)
        assert not result["kept"]
        assert said in " ".join(result.sections.files.changed), result["reason"]


def test_a_setting_that_saving_drops_is_no_contradiction(source: Path, tmp_path: Path) -> None:
    """The source's tokenizer, saved again after growth, says less and does the same."""
    again = shutil.copytree(source, tmp_path / "again")
    edit_config(again, "tokenizer_config.json", add_bos_token=True)
    grown = tmp_path / "grown"
    growkit.grow(again, grown, ffn="x2", verify=False)
    AutoTokenizer.from_pretrained(again).save_pretrained(again)
    assert "add_bos_token" not in (again / "tokenizer_config.json").read_text()
    assert growkit.verify(again, grown, **QUICK)["kept"]
    edit_config(grown, "tokenizer_config.json", eos_token="e")
    assert not growkit.verify(again, grown, **QUICK)["kept"]


PROOF = growkit.Settings(prompts=1, length=16)
GROWTHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = listed(
    "without_manifest", "growths"
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """``pairs("wider")`` -> source and target, made when they are first asked for."""

    @cache
    def pair(name: str) -> tuple[Path, Path]:
        kind, settings, growth = GROWTHS[name]
        folder = tmp_path_factory.mktemp("pair")
        source = folder / "source"
        if kind in {*KINDS, "blenderbot", "jetmoe"}:
            save(kind, source, **settings)
        else:
            save_model(source, kind, **settings)
        experts = {} if growth.get("method") not in ("experts", "upcycle") else {"experts": "x4"}
        growkit.grow(source, folder / "target", verify=False, **growth, **experts)
        return source, folder / "target"

    return pair


@pytest.mark.sampled(1, "another class")
@pytest.mark.parametrize("name", GROWTHS)
def test_no_false_alarm(name: str, pairs: Callable[[str], tuple[Path, Path]]) -> None:
    assert found(*pairs(name))[0] == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "key", "value", "changed"), listed("without_manifest", "a setting of a grown model")
)
def test_a_setting_of_a_grown_model(
    name: str, key: str, value: Any, changed: bool, pairs: Callable[[str], tuple[Path, Path]]
) -> None:
    source, target = pairs(name)
    was = (target / "config.json").read_bytes()
    also = {"sliding_window": 40} if key == "layer_types" and changed else {}
    try:
        edit_config(target, **{key: value}, **also)
        decides, told = found(source, target)
        checkpoints = Checkpoint(source), Checkpoint(target)
        lineage = lineage_of(*checkpoints, read_record(checkpoints[1].opened))
        by_manifest = compare_with_plan(lineage, checkpoints[1])
    finally:
        (target / "config.json").write_bytes(was)
    assert any(key in said for said in (decides if changed else told)), (decides, told)
    assert changed or not decides
    assert any(key in said for said in (*by_manifest.changed, *by_manifest.named))


LEFT_OUT = (*("max_position_embeddings", "rope_parameters"), *("bos_token_id", "eos_token_id"))
OTHER_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "differential": ("qwen2", "convert", {"to": "diff"}),
    "experts": ("olmo2", "grow", {"method": "upcycle", "experts": 4}),
    "layout": ("llama", "convert", {"to": "mistral"}),
}


def without_keys(folder: Path, kind: str) -> Path:
    """A folder whose config leaves out what its class and others assume otherwise."""
    source = save_model(folder / "source", kind, pad_token_id=3)
    with edit_json(source / "config.json") as config:
        for key in LEFT_OUT:
            del config[key]
    return source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_what_a_class_assumes_goes_along(name: str, tmp_path: Path) -> None:
    kind, verb, options = OTHER_CLASSES[name]
    source = without_keys(tmp_path, kind)
    made = getattr(growkit, verb)(source, tmp_path / "out", verify=PROOF, **options)
    assert made["kept"], made["verification"]["reason"]
    was, now = (AutoConfig.from_pretrained(each).to_dict() for each in (source, tmp_path / "out"))
    assert {key: now[key] for key in LEFT_OUT} == {key: was[key] for key in LEFT_OUT}


def test_a_plan_that_changes_what_a_class_assumes_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_planning, "write_defaults_out", lambda source, target: target.config)
    source = without_keys(tmp_path, "qwen2")
    made = growkit.convert(source, tmp_path / "out", to="diff", verify=PROOF)
    assert not made["kept"]
    reason = made["verification"]["reason"]
    assert "is not what it is in the source" in reason, reason
    assert "max_position_embeddings in config.json" in made["verification"].sections.files.changed
    longest = next(m for m in made["verification"].sections.modes.modes if m["name"] == LONGEST)
    assert "32,767" in longest["note"]  # the source's limit: the target's is lower


def test_the_layers_of_a_deeper_model_keep_their_types(tmp_path: Path) -> None:
    """Right ones go without saying; wrong ones decide, by their entries or in long texts."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    settings = {"num_hidden_layers": 3, "layer_types": types, "sliding_window": 40, "head_dim": 4}
    source, target = save_model(tmp_path / "source", "ministral", **settings), tmp_path / "target"
    steps = growkit.GrowStep("depth", layers=5), growkit.GrowStep("hypercloning", hidden="x2")
    growkit.run(growkit.Recipe(str(source), steps, str(target), verify=None))
    planned = json.loads((target / "config.json").read_text())["layer_types"]
    bare(target)
    assert found(source, target) == ((), ())
    few = growkit.Settings(prompts=1, length=24)
    assert growkit.verify(source, target, few)["kept"]
    for one, other in ((0, 4), (0, 2)):
        wrong = list(planned)
        wrong[one], wrong[other] = planned[other], planned[one]
        edit_config(target, layer_types=wrong)
        assert not growkit.verify(source, target, few)["kept"]
    assert in_order("ab", "aabb")
    assert not in_order("ab", "bbaa")


@pytest.mark.parametrize(("stored", "said"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_dtype_that_the_source_leaves_out(stored: str, said: str, tmp_path: Path) -> None:
    """It is loaded in that of its weights, so any other one decides."""
    dtype = getattr(torch, stored)
    for name in ("source", "out"):
        save_model(tmp_path / name, "llama", dtype=dtype)
    with edit_json(tmp_path / "source" / "config.json") as config:
        del config["dtype"]
    edit_config(tmp_path / "out", dtype=said)
    assert "dtype in config.json" in found(tmp_path / "source", tmp_path / "out")[0]


@pytest.mark.parametrize("narrow", ["lm_head.weight", "model.norm.weight"])
def test_the_first_tensor_decides_on_the_dtype(narrow: str, tmp_path: Path) -> None:
    """The head comes before the other tensors; the last norm does not."""
    source = save_model(tmp_path / "source", "llama")
    with edit_json(source / "config.json") as config:
        del config["dtype"]
    with edit_weights(source) as weights:
        weights[narrow] = weights[narrow].bfloat16().float()
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as weights:
        weights[narrow] = weights[narrow].bfloat16()
    loads = AutoModelForCausalLM.from_pretrained(target).dtype
    assert loads == (torch.bfloat16 if narrow == "lm_head.weight" else torch.float32)
    decides = found(source, target)[0]
    assert ("dtype in config.json" in decides) == (loads == torch.bfloat16)


def bare(folder: Path) -> Path:
    """A folder that says nothing of how it was made."""
    for name in ("growkit.json", "README.md"):
        (folder / name).unlink()
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_positions_in_a_table(rows: int, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt2")
    target = tmp_path / "target"
    growkit.grow(source, target, hidden="x2", verify=False)
    with edit_weights(bare(target)) as weights:
        table = weights["transformer.wpe.weight"]
        weights["transformer.wpe.weight"] = torch.cat([table, table])[:rows]
    edit_config(target, n_positions=rows)
    assert found(source, target)[0] == (() if rows == 64 else ("n_positions in config.json",))
    assert growkit.verify(source, target, **QUICK)["kept"] == (rows == 64)


@pytest.mark.parametrize("window", [None, 4096])
def test_the_window_that_a_class_assumes(window: int | None, make: Make, tmp_path: Path) -> None:
    source = make("llama", max_position_embeddings=16384)
    target = tmp_path / "target"
    growkit.grow(source, target, method="depth", layers=3, verify=False)
    bare(target)
    assert CONFIG_MAPPING["mistral"]().sliding_window == 4096
    said = {} if window else {"sliding_window": None}
    edit_config(target, model_type="mistral", architectures=["MistralForCausalLM"], **said)
    result = growkit.verify(source, target, **QUICK)
    assert result["kept"] == (window is None), result["reason"]
    assert ("sliding_window in config.json" in result["reason"]) == (window is not None)


def test_a_window_that_one_class_ignores(make: Make, tmp_path: Path) -> None:
    source = make("mistral", sliding_window=40)
    target = shutil.copytree(source, tmp_path / "target")
    edit_config(target, model_type="llama", architectures=["LlamaForCausalLM"])
    for pair in ((source, target), (target, source)):
        result = growkit.verify(*pair, **QUICK)
        assert not result["kept"]
        assert "sliding_window" in result["reason"]
        assert "40, which only one of the two classes reads" in result["reason"]
    assert growkit.verify(target, shutil.copytree(target, tmp_path / "same"), **QUICK)["kept"]


@pytest.mark.parametrize("key", ["attention_chunk_size", "per_layer_config"])
def test_caches_follow_keys_that_a_class_ignores(key: str, make: Make, tmp_path: Path) -> None:
    source = make("mistral", sliding_window=None)
    target = shutil.copytree(source, tmp_path / "target")
    edit_config(target, model_type="llama", architectures=["LlamaForCausalLM"])
    assert found(source, target)[0] == ()
    edit_config(target, **{key: 40 if "size" in key else {"0": {"sliding_window": 40}}})
    assert found(source, target)[0] == found(target, source)[0] == (f"{key} in config.json",)


@pytest.mark.parametrize(
    ("key", "judged"), [("attn_scale", False), ("floor_scale", False), ("rms_norm_eps", True)]
)
def test_a_scale_of_late_positions_is_not_judged_by_logits(
    key: str, judged: bool, tmp_path: Path
) -> None:
    source = Checkpoint(save_model(tmp_path / "source", "llama4_text", **MOE))
    config = loading(source).config
    found = different_settings(config, {**config, key: 2 * config[key]}, judge(source))
    assert found == (([], [key]) if judged else ([key], []))


def test_what_a_class_assumes_of_long_texts_is_named() -> None:
    llama, other = resolved({"model_type": "llama"}), resolved({"model_type": "gpt_neo"})
    judged = partial(different_settings, shown=lambda *values: False)
    assert "window_size" in judged(llama, other)[1]
    assert "window_size" not in judged(llama | {"window_size": 256}, other)[1]
    assert not any("classifier_dropout" in keys for keys in judged(llama, other))
    assert "classifier_dropout" in judged(llama, other | {"classifier_dropout": 0.5})[0]


def test_the_dtype_that_weights_are_stored_in(source: Path, target: Path) -> None:
    with edit_weights(target) as weights:
        weights |= {name: tensor.double() for name, tensor in weights.items()}
    edit_config(target, dtype="float64")
    assert found(source, target) == ((), ("dtype in config.json differs",))


def test_a_dtype_that_is_left_out_is_that_of_the_weights(source: Path, tmp_path: Path) -> None:
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    with edit_json(tmp_path / "out" / "config.json") as config:
        del config["dtype"]
    for manifest in (True, False):
        if not manifest:
            (tmp_path / "out" / "growkit.json").unlink()
        result = growkit.verify(source, tmp_path / "out", **QUICK)
        assert result["kept"], result["reason"]


# Arguments that are exchanged.

SAID = "the arguments seem to be swapped"


def made(source: Path, target: Path, how: str) -> Path:
    if how == "convert":
        growkit.convert(source, target, "diff-v2", verify=False)
    else:
        method = "depth" if how == "layers" else "hypercloning"
        growkit.grow(source, target, method=method, verify=False, **{how: "x2"})
    return target


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("exchanged") / "source", "llama")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["hidden", "ffn", "layers", "convert"])
def test_exchanged_arguments(how: str, llama: Path, tmp_path: Path) -> None:
    target = made(llama, tmp_path / "target", how)
    assert growkit.verify(llama, target, **QUICK)["kept"]
    with pytest.raises(InputError, match=f"^{SAID}: according to its growkit.json, .*target"):
        growkit.verify(target, llama, **QUICK)
    done = cli("verify", target, llama)
    assert done.exit_code == 2
    assert f"growkit verify {llama} {target}" in " ".join(done.output.split())
    (target / "growkit.json").unlink()  # nothing says which was first
    other_way = growkit.verify(target, llama, **QUICK)
    assert other_way["kept"], other_way["reason"]
    assert other_way.sections.weights.recovered is None


def test_sources_that_were_made_themselves(llama: Path, tmp_path: Path) -> None:
    """A source may have a manifest, whether its target has one or was saved again without."""
    first = made(llama, tmp_path / "first", "hidden")
    second = made(first, tmp_path / "second", "ffn")
    assert growkit.verify(first, second, **QUICK)["kept"]
    assert growkit.verify(first, first, **QUICK).sections.logits.strict_float64.relative == 0
    with pytest.raises(InputError, match=SAID):
        growkit.verify(second, first, **QUICK)
    (second / "growkit.json").unlink()
    assert growkit.verify(first, second, **QUICK).sections.weights.recovered is None
    (first / "growkit.json").write_text("{")  # it says nothing that could be read
    assert growkit.verify(first, second, **QUICK)["kept"]


def test_a_vocabulary_that_grew(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    growkit.grow(llama, target, vocab="x2", verify=False)
    with pytest.raises(InputError, match="the source comes first"):
        growkit.verify(target, llama, **QUICK)


@pytest.mark.sampled(1, "mixtral-bfloat16-changed as requested")
@pytest.mark.parametrize(
    ("dtype", "verdict"), [("bfloat16", "changed as requested"), ("float32", "preserved")]
)
@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_ties_of_experts_are_bounded_as_with_a_manifest(
    kind: str, dtype: str, verdict: str, tmp_path: Path
) -> None:
    """Of more experts, of which a token may get copies of two in a short dtype."""
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = (
        {"num_local_experts": 4}
        if kind == "mixtral"
        else {"n_routed_experts": 4, "first_k_dense_replace": 0}
    )
    save_model(source, kind, dtype=getattr(torch, dtype), num_experts_per_tok=2, **sizes)
    growkit.grow(source, target, method="experts", experts="x2", verify=False)
    assert growkit.verify(source, target, **QUICK)["verdict"] == verdict
    (target / "growkit.json").unlink()
    assert growkit.verify(source, target, **QUICK)["verdict"] == verdict


EARLIER: dict[str, dict[str, Any]] = listed("without_manifest", "earlier")
"""Keys with which transformers 4.57 writes the config of a type, without ``rope_parameters``."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", EARLIER)
def test_a_folder_that_an_earlier_transformers_wrote(kind: str, tmp_path: Path) -> None:
    """It is the same model as the one that is saved now, in both directions."""
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    now = save(kind, tmp_path / "now", **(linear if kind == "llama" else {}))
    before = shutil.copytree(now, tmp_path / "before")
    config = json.loads((now / "config.json").read_text())
    config |= EARLIER[kind]
    config.pop("rope_parameters", None)
    (before / "config.json").write_text(json.dumps(config))
    settings = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 1}
    settings |= {"pad_token_id": 1, "transformers_version": "4.57.3"}
    (before / "generation_config.json").write_text(json.dumps(settings))
    for pair in ((before, now), (now, before)):
        result = growkit.verify(*pair, **QUICK)
        assert result["kept"], result["reason"]
    (before / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.5}))
    assert (
        "temperature in the generation settings" in growkit.verify(now, before, **QUICK)["reason"]
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("rope", "kinds"), listed("without_manifest", "odd rotary parameters"))
def test_odd_rotary_parameters_are_another_model(
    kind: str, rope: Any, kinds: Any, make: Make, tmp_path: Path
) -> None:
    source, target = make(kind), make(kind)
    with edit_json(target / "config.json") as config:
        config["rope_parameters"] = rope
        config |= {"layer_types": kinds} if kinds else {}
    with suppress(InputError):
        assert not growkit.verify(source, target, prompts=1, length=12)["kept"]
    with suppress(InputError):
        growkit.convert(target, tmp_path / "out", "mlx", verify=False)
