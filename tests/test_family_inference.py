"""Families that people describe: in YAML, or as their class of transformers shows them."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError, PlaceError
from growkit.engine.recipe_planning import change
from growkit.engine.user_family import described_family
from growkit.extras.depth import relayering
from growkit.extras.depth.growth import layer_types
from growkit.extras.family_inference import inferring
from growkit.extras.family_inference.classes import ModelClass, as_in_files
from growkit.extras.family_inference.inferring import InferredFamily, SmallModel, try_growth
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import described, families
from growkit.planning.plan import Planned
from growkit.planning.recipe import GrowStep
from tests.architectures import TYPES, build, config_of, save
from tests.commands import cli
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import relative_error, save_model, save_random
from tests.test_manifests import difference
from tests.test_python import SCHEMA, as_json, wrong

FEW = growkit.Settings(prompts=1, length=12)


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family that growkit does not know."""
    sizes = {"vocab_size": 29, "hidden_size": 64, "max_position_embeddings": 64}
    return save("arcee", tmp_path_factory.mktemp("models") / "arcee", **sizes)


@pytest.fixture(scope="module")
def found(arcee: Path) -> growkit.Inference:
    """What is inferred of it."""
    return growkit.infer(arcee)


def command(*arguments: object) -> tuple[int, str]:
    done = cli(*arguments)
    return done.exit_code, done.output


def test_a_family_that_nobody_knows(arcee: Path, tmp_path: Path) -> None:
    code, text = command("inspect", arcee, "--infer")
    assert code == 0, text
    assert "# Sure: everything that could be tried computes the same." in text
    file = tmp_path / "arcee.yaml"
    file.write_text(text)
    assert command("inspect", arcee, "--family", file)[0] == 0


def test_an_unknown_family_is_inferred_in_the_run(arcee: Path, tmp_path: Path) -> None:
    sizes = ("--hidden", "x2", "--prompts", 1, "--length", 12)
    code, said = command("grow", arcee, tmp_path / "out", *sizes)
    assert code == 0, said
    assert re.search(r"family inferred from ArceeForCausalLM in [\d.]+ s, every axis tried", said)
    made = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert made["recipe"]["family"]["model_type"] == "arcee"
    assert relative_error(arcee, tmp_path / "out") < 1e-12
    verdict = growkit.verify(arcee, tmp_path / "out", settings=FEW)  # the manifest has all of it
    assert verdict["kept"]
    assert verdict.sections.weights.recovered


@pytest.mark.parametrize("number", [9])
def test_a_fault_of_the_place_is_no_property_of_a_class(
    number: int, arcee: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small model that is grown along every axis cannot be opened once."""
    really, tried = os.open, count()

    def fail_once(path: Any, *arguments: Any, **options: Any) -> int:
        if "growkit-inference" in str(path) and next(tried) == number:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        return really(path, *arguments, **options)

    inferring.inferred_families.clear()
    monkeypatch.setattr(os, "open", fail_once)
    with pytest.raises(PlaceError, match="cannot hold temporary files"):
        growkit.infer(arcee)


KNOWN = sorted(
    {kind for family in families().values() for kind in family.model_types}
    & {*TYPES}
    # Of these something is known that no trial finds: signs of heads, a key that the class ignores,
    # a second key of the same size.
    - {"diffllama", "cohere2", "mamba"}
)

GROWTHS: list[tuple[str, dict[str, Any]]] = [
    *(("hypercloning", {"hidden": factor}) for factor in ("x2", "x3", "x3/2")),
    *(("hypercloning", {axis: "x2"}) for axis in ("ffn", "heads")),
    ("depth", {"layers": "x2"}),
    ("experts", {"experts": "x2"}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KNOWN)
def test_known_families_are_found_again(kind: str, tmp_path: Path) -> None:
    """From the class alone: every growth makes the same numbers as with growkit's description."""
    source = Checkpoint(save(kind, tmp_path))
    found = InferredFamily(source.config, "here").description

    def grown(family: dict[str, Any] | None, method: str, sizes: dict[str, Any]) -> Any:
        made: Any = source.with_family(described_family(family))
        try:
            plans = change(GrowStep(method, sizes), made, 0).plans
        except growkit.InputError:
            return None
        for plan in plans:
            made = Planned(made, plan)
        return dict(made.config), {name: made.read(name) for name in made.tensors}

    for method, sizes in GROWTHS:
        here, there = grown(None, method, sizes), grown(found, method, sizes)
        assert (here is None) == (there is None), sizes
        if here:
            assert here[0] == there[0], sizes
            assert here[1].keys() == there[1].keys()
            assert all(torch.equal(here[1][name], there[1][name]) for name in here[1]), sizes


PUBLISHED = listed("inference", "published")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes_are_described(kind: str) -> None:
    """What is seen in small models holds for shapes of the large model, and every axis grows."""
    config = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict()))
    config |= {"attn_layer_indices": [9, 18, 27]} if kind == "bamba" else {}
    found = InferredFamily(config, "here")
    assert {"hidden", "layers"} <= {trial["axis"] for trial in found.trials}
    assert all(trial.exact for trial in found.trials)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(found.asked.config({})).from_dict(config))
    family = described(found.description, kind)
    sizes, patterns = family.sizes(config), family.patterns(config)
    expected = as_in_files(model, model.state_dict())
    assert patterns.keys() | {"lm_head.weight"} == expected.keys() | {"lm_head.weight"}
    wrong = {n for n, p in patterns.items() if p.shape(sizes) != tuple(expected[n].shape)}
    assert wrong == set()


ODD = listed("inference", "odd")


@pytest.mark.sampled(1, "left out")
@pytest.mark.parametrize("case", ODD)
def test_odd_models(case: str, tmp_path: Path) -> None:
    kind, more, growths = ODD[case]
    source = save_random(tmp_path / "source", config_of(kind, **more))
    for at, growth in enumerate(growths):
        out = tmp_path / f"out-{at}"
        verify = FEW if growth.pop("verify", False) else False
        made = growkit.grow(source, out, verify=verify, **growth)
        assert (made["promise"], made["kept"] is False) == ("exact", False)
        assert relative_error(source, out) < 1e-12


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = listed("inference", "refused")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "more", "growth", "says"), REFUSED)
def test_odd_sizes_are_refused_before_writing(
    kind: str, more: dict[str, Any], growth: dict[str, Any], says: str, tmp_path: Path
) -> None:
    source = save_random(tmp_path / "source", config_of(kind, **more))
    with pytest.raises(InputError, match=says):
        growkit.grow(source, tmp_path / "out", verify=False, **growth)
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "prefix", "names"), listed("inference", "old buffers"))
def test_buffers_of_old_checkpoints_are_left_out(
    kind: str, prefix: str, names: list[str], tmp_path: Path
) -> None:
    source = save(kind, tmp_path / "source")
    plain = shutil.copytree(source, tmp_path / "plain")
    with edit_weights(source) as tensors:
        tensors |= {f"{prefix}.{name}": torch.ones(1, 1, 64, 64) for name in names}
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert relative_error(plain, tmp_path / "out") < 1e-12
    with edit_weights(source) as tensors:
        tensors[f"{prefix}.other"] = torch.ones(1)
    with pytest.raises(growkit.InputError, match=r"other in .* is not part of"):
        growkit.grow(source, tmp_path / "again", hidden="x2", verify=False)
    with pytest.raises(growkit.InputError, match=r"other in .* is not part of"):
        growkit.infer(source)


def a_few_tokens_may_choose_the_same_experts(tmp_path: Path) -> None:
    """Whether corrections are divided or not; more tokens show that they must be."""
    layers = {"num_hidden_layers": 5, "moe_layer_end_index": 3, "moe_layer_interval": 2}
    more = {"hidden_size": 36, "head_dim": 10, "num_key_value_heads": 1, "use_bias": True}
    config = config_of("ernie4_5_moe", **layers, **more, moe_num_shared_experts=2)
    found = InferredFamily(json.loads(config.to_json_string(use_diff=False)), "here")
    assert found.description["experts"]["divided"]


def the_order_of_heads_is_tried(tmp_path: Path) -> None:
    """Whether three matrices stand in each head or one behind the other, no shape says."""
    result = growkit.infer(save("gpt_neox", tmp_path / "source"))
    assert result["sure"]
    assert re.search(r"# tried; by its shape also .*three\.heads\.head_dim", result["yaml"])


def test_a_wrong_axis_is_caught(arcee: Path, found: growkit.Inference, tmp_path: Path) -> None:
    """By the trial, and by the proof of a model: exit code 1, and no folder of that name."""
    wrong = deepcopy(found["family"])
    name = "model.layers.{layer}.self_attn.o_proj.weight"
    assert wrong["tensors"][name] == "hidden <- heads.head_dim"
    wrong["tensors"][name] = "hidden <- head_dim.heads"
    asked = ModelClass(json.loads((arcee / "config.json").read_text()), "here")
    small = SmallModel.saved(asked, tmp_path / "small")
    assert try_growth(small, "heads", wrong).wrong
    assert all(trial.exact for trial in found["trials"])
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    code, said = command(
        *("grow", arcee, tmp_path / "out", "--family", tmp_path / "wrong.yaml", "--heads", "x2"),
        *("--prompts", 1, "--length", 12),
    )
    assert code == 1
    assert "not preserved" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("changes", "says"), listed("inference", "mistakes in a description"))
def test_mistakes_in_a_description(
    changes: dict[str, Any], says: str, arcee: Path, found: growkit.Inference, tmp_path: Path
) -> None:
    """Each in a sentence, before anything is written."""
    spoiled = deepcopy(found["family"])
    for key, value in changes.items():
        place, _, name = key.partition("/")
        at = spoiled.setdefault(place, {}) if name else spoiled
        at.pop(name or place, None)
        if value is not None:
            at[name or place] = value
    if "assumed/rms_norm_eps" in changes:
        arcee = shutil.copytree(arcee, tmp_path / "source")
        with edit_json(arcee / "config.json") as config:
            del config["rms_norm_eps"]
    with pytest.raises(growkit.InputError, match=says):
        growkit.grow(arcee, tmp_path / "out", family=spoiled, hidden="x2", verify=False)
    assert not (tmp_path / "out").exists()


def lying(folder: Path, family: dict[str, Any], **settings: Any) -> Path:
    """A folder whose manifest has this description, and whose config has these settings."""
    with edit_json(folder / "growkit.json") as manifest:
        manifest["recipe"]["family"] = family
    edit_config(folder, **settings)
    return folder


def test_a_setting_is_no_size(arcee: Path, found: growkit.Inference, tmp_path: Path) -> None:
    """A description that says so is refused; in a manifest, it is as if there were none."""
    growkit.grow(arcee, tmp_path / "out", family=found["family"], hidden="x2", verify=False)
    assert growkit.verify(arcee, tmp_path / "out", settings=FEW)["kept"]  # the control
    wrong = deepcopy(found["family"])
    wrong["sizes"]["max_position_embeddings"] = "hidden"  # both are 64
    with pytest.raises(growkit.InputError, match="length of the context does not grow"):
        growkit.grow(arcee, tmp_path / "other", family=wrong, hidden="x2", verify=False)
    verdict = growkit.verify(
        arcee, lying(tmp_path / "out", wrong, max_position_embeddings=128), settings=FEW
    )
    assert not verdict["kept"]
    assert "max_position_embeddings in config.json is not what it is" in verdict["reason"]
    assert verdict.sections.weights.recovered is None
    wrong = deepcopy(found["family"])
    wrong["sizes"]["eos_token_id"] = "one"
    with pytest.raises(growkit.InputError, match="has eos_token_id among its sizes, but no tensor"):
        growkit.grow(arcee, tmp_path / "other", family=wrong, hidden="x2", verify=False)


@pytest.fixture(scope="module")
def dots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dots"
    return save("dots1", folder, num_hidden_layers=3, n_shared_experts=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("growth", listed("inference", "growths of what is described"), ids=str)
def test_experts_and_conditions_are_described(
    growth: dict[str, Any], dots: Path, tmp_path: Path
) -> None:
    """In the words of growkit's own families, one of which is extended."""
    family = listed("inference", "dots")
    made = growkit.grow(dots, tmp_path / "out", family=family, verify=FEW, **growth)
    assert made["kept"], made["verification"]
    assert relative_error(dots, tmp_path / "out") < 1e-12
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["first_k_dense_replace"]
    assert layers == (2 if growth.get("method") == "depth" else 1)


@pytest.mark.parametrize(
    ("change", "says"), listed("inference", "mistakes in the words of families"), ids=str
)
def test_mistakes_in_the_words_of_families(
    change: dict[str, Any], says: str, dots: Path, tmp_path: Path
) -> None:
    family = listed("inference", "dots")
    for key, value in change.items():
        family[key] = {**family.get(key, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(growkit.InputError, match=says):
        growkit.grow(dots, tmp_path / "out", family=family, method="depth", layers=6, verify=False)
    assert not (tmp_path / "out").exists()


def test_a_recipe_names_the_file_of_a_family_that_extends_another(
    arcee: Path, found: growkit.Inference, tmp_path: Path
) -> None:
    """As in the documentation."""
    assert [] in [wrong(as_json(found), each) for each in SCHEMA["anyOf"]]
    text = (Path(growkit.__file__).parents[1] / "docs" / "reference" / "families.md").read_text()
    (written,) = re.findall(r"```yaml\n(family: Arcee.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(written)
    out, step = tmp_path / "out", {"grow": "hypercloning", "hidden": "x2"}
    recipe = {"source": str(arcee), "output": str(out), "steps": [step], "verify": False}
    recipe["family"] = str(tmp_path / "mine.yaml")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert growkit.run(tmp_path / "recipe.yaml")["promise"] == "exact"
    assert relative_error(arcee, out) < 1e-12
    recorded = json.loads((out / "growkit.json").read_text())["recipe"]["family"]
    assert "extends" not in recorded
    assert recorded["sizes"]["vocab_size"] == "vocab"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bloom", "openai-gpt", "opt", "phi", "starcoder2"])
def test_the_dtype_of_the_files_hides_no_norm(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = []
    for each in (torch.float32, dtype):
        build(kind).to(each).save_pretrained(tmp_path / str(each))
        inference = growkit.infer(tmp_path / str(each))
        assert "norm: hidden" in inference["yaml"]
        found.append((inference["family"], [trial["options"] for trial in inference["trials"]]))
    assert found[0] == found[1]


def test_windows_go_along_with_their_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a config leaves the kinds of layers to the class, in a model made deeper."""
    source = save("cwm", tmp_path / "source", sliding_window=30, num_hidden_layers=4)
    with edit_json(source / "config.json") as config:
        kinds = config.pop("layer_types")
    assert len({*kinds}) == 2
    family = growkit.infer(source)["family"]
    deeper: dict[str, Any] = {"family": family, "method": "depth", "place": 0, "verify": FEW}
    assert growkit.grow(source, tmp_path / "out", **deeper)["kept"]
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["layer_types"] == [kinds[0], *kinds]
    assert difference(source, tmp_path / "out", 1e-7) is None
    # The control: the proof sees it where a plan leaves it to the class.
    monkeypatch.setattr(relayering, "added_lists", lambda *_: {})
    for module in (relayering, layer_types):
        monkeypatch.setattr(module, "derived_lists", lambda *_: {})
    made = growkit.grow(source, tmp_path / "other", **deeper)
    assert made["kept"] is False
    assert "self_attn.layer_type is not what growkit" in made["verification"]["reason"]


def growkits_families_are_not_described(tmp_path: Path) -> None:
    """What a folder says of the family of a known type decides nothing, and people are told."""
    window = {"intermediate_size": 24, "sliding_window": 24, "max_position_embeddings": 256}
    source = save_model(tmp_path / "source", "mistral", **window)
    family = growkit.infer(source)["family"]
    with pytest.raises(growkit.InputError, match="growkit has one of its own, and the proof uses"):
        growkit.grow(source, tmp_path / "out", family=family, ffn="x2")
    growkit.grow(source, tmp_path / "out", ffn="x2", verify=False)
    verdict = growkit.verify(source, lying(tmp_path / "out", family), settings=FEW)
    assert verdict["kept"]
    assert "the family in the manifest was not used" in verdict["reason"]
    family["sizes"]["sliding_window"] = "ffn"
    out = lying(tmp_path / "out", family, sliding_window=48)
    verdict = growkit.verify(source, out, settings=FEW)
    assert not verdict["kept"]
    assert "sliding_window in config.json is not what growkit" in verdict["reason"]


def a_head_of_its_own_has_a_bias_of_its_own(tmp_path: Path) -> None:
    """BERT's class ties the bias of its head as well, as long as the head is the embedding."""
    config = config_of("bert-generation", tie_word_embeddings=True)
    source, out = save_random(tmp_path / "source", config), tmp_path / "out"
    assert growkit.grow(source, out, hidden="x2", untie=True, verify=FEW)["kept"]
    assert relative_error(source, out) < 1e-12
    # The control: the bias that the head adds is the new one.
    with edit_weights(out) as weights:
        weights["lm_head.decoder.bias"][3] += 1
    assert relative_error(source, out) > 1e-6


@pytest.mark.sampled(1, "lfm2-new1-old1-growth1")
@pytest.mark.parametrize(
    ("kind", "new", "old", "growth"), listed("inference", "keys of published configs")
)
def test_keys_of_published_configs(
    kind: str, new: dict[str, Any], old: dict[str, Any], growth: dict[str, Any], tmp_path: Path
) -> None:
    """The class reads them only in place of others, so growth must change those."""
    source, out = tmp_path / "source", tmp_path / "out"
    more = {"block_auto_adjust_ff_dim": False} if kind == "lfm2" else {}
    save_random(source, config_of(kind, **new, **more))
    with edit_json(source / "config.json") as config:
        for key in new:
            config.pop(key, None)
        config.update(old)
    result = growkit.grow(source, out, verify=FEW, **growth)
    assert result["kept"], result["verification"]["reason"]
    assert relative_error(source, out) < 1e-12
    assert old.keys() <= json.loads((out / "config.json").read_text()).keys()


def a_width_that_the_class_rounds(tmp_path: Path) -> None:
    """To a multiple: twice the number is not twice the width, but twice another number is."""
    config = config_of("lfm2", intermediate_size=50, block_multiple_of=32)
    source, out = save_random(tmp_path / "source", config), tmp_path / "out"
    with pytest.raises(growkit.InputError, match=r"rounds .*_size 50 to a width of 64; .* by 96,"):
        growkit.grow(source, out, ffn="x2")
    growkit.grow(source, out, hidden="x2", verify=False)  # the control: the width stays
    assert relative_error(source, out) < 1e-12
    with edit_json(source / "config.json") as content:
        content["intermediate_size"] = 96
    assert growkit.grow(source, out, ffn="x2", verify=FEW, overwrite=True)["kept"]
    assert relative_error(source, out) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "check",
    [
        a_few_tokens_may_choose_the_same_experts,
        the_order_of_heads_is_tried,
        growkits_families_are_not_described,
        a_head_of_its_own_has_a_bias_of_its_own,
        a_width_that_the_class_rounds,
    ],
)
def test_single_classes(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
