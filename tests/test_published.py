"""The config.json of a grown model has its publisher's keys, for whatever software reads it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.extras.formats.weight_formats.mlx import FORMAT as MLX
from growkit.sources import family_for, find
from tests.files import edit_json
from tests.models import relative_error

CONFIGS: dict[str, dict[str, Any]] = {
    (line := json.loads(each))["name"]: line["config"]
    for each in (Path(__file__).parent / "published.jsonl").read_text().splitlines()
}
GROWTHS: dict[str, dict[str, Any]] = {
    "width": {"hidden": "x2"},
    "depth": {"method": "depth", "layers": "x2"},
    "experts": {"method": "experts", "experts": "x2"},
}
SHORT = Settings(prompts=2, length=16)
PERIODS = {"full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval"}
"""Keys that go if a list of layers must say something else."""

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")


def save(folder: Path, config: dict[str, Any]) -> None:
    """Save a random model with this very config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    read = AutoConfig.from_pretrained(folder)
    known: Any = AutoModelForImageTextToText
    auto: Any = known if type(read) in known._model_mapping else AutoModelForCausalLM
    model = auto.from_config(read, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def changed(place: Path, name: str, **options: Any) -> dict[str, Any]:
    """Grow a model with a published config; the new value of every key, None for a lost one."""
    if not (place / "source").exists():
        save(place / "source", CONFIGS[name])
    growkit.grow(place / "source", place / "grown", verify=False, overwrite=True, **options)
    was = CONFIGS[name].get("text_config", CONFIGS[name])
    now = json.loads((place / "grown" / "config.json").read_text())
    return {key: now.get(key) for key in was | now if key not in was or was[key] != now.get(key)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_only_sizes_change(tmp_path: Path, name: str, growth: str) -> None:
    """No key is lost and none is added, whoever published the model."""
    try:
        found = changed(tmp_path, name, **GROWTHS[growth])
    except InputError as refused:
        pytest.skip(str(refused))
    lost = {key for key, value in found.items() if value is None}
    new = found.keys() - CONFIGS[name].get("text_config", CONFIGS[name]).keys()
    assert lost <= PERIODS
    allowed = {"layer_types"}
    if "text_config" in CONFIGS[name]:  # what the whole model says of its language model
        allowed |= {"architectures", "torch_dtype", *CONFIGS[name]}
    assert new <= allowed
    assert all(
        type(value) in (int, list, str, dict) or key == "router_aux_loss_coef"
        for key, value in found.items()
        if key not in lost
    )
    assert relative_error(tmp_path / "source", tmp_path / "grown") < 1e-12


def sizes_and_kinds_of_layers_change_under_every_name(tmp_path: Path) -> None:
    """Also where transformers reads another key; and equal runs write the same bytes."""
    name = "LiquidAI/LFM2-1.2B"
    save(tmp_path / "source", CONFIGS[name])
    inferred = family_for(find(tmp_path / "source"), None)
    family = inferred.description if inferred else None
    wide = {**dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out", "hidden_size"), 64)}
    wide |= {"block_ff_dim": 192}
    heads = {"num_attention_heads": 8, "num_heads": 8, "num_key_value_heads": 4}
    assert changed(tmp_path, name, hidden="x2", family=family) == wide | heads
    written = (tmp_path / "grown" / "config.json").read_bytes()
    changed(tmp_path, name, hidden="x2", family=family)
    assert (tmp_path / "grown" / "config.json").read_bytes() == written
    other = shutil.copytree(tmp_path / "grown", tmp_path / "other")
    (other / "growkit.json").unlink()
    assert growkit.verify(tmp_path / "source", other, SHORT)["kept"]
    with edit_json(other / "config.json") as config:
        config["num_heads"] = CONFIGS[name]["num_heads"]  # which other software reads
    stale = growkit.verify(tmp_path / "source", other, SHORT)["reason"]
    assert "num_heads in config.json is not what growkit" in stale
    assert "4 in place of 8" in stale
    deeper = changed(tmp_path, name, method="depth", layers="x2", family=family)
    assert deeper == {"num_hidden_layers": 8, "full_attn_idxs": [2, 3, 6, 7]}


def periods_hold_after_several_steps(tmp_path: Path) -> None:
    """A step knows the keys of a model that an earlier step of the recipe makes."""
    name = "Qwen/Qwen3-Next-80B-A3B"
    save(tmp_path / "source", CONFIGS[name])
    steps = [{"grow": "hypercloning", "hidden": "x2"}, {"grow": "depth", "layers": "x2"}]
    recipe = {"source": str(tmp_path / "source"), "output": str(tmp_path / "out"), "steps": steps}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    growkit.run(tmp_path / "recipe.yaml", verify=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.keys() == CONFIGS[name].keys()
    key = "full_attention_interval"
    assert written[key] == CONFIGS[name][key]


def repeated_blocks_of_layers_are_written_out(tmp_path: Path) -> None:
    """Older transformers builds the layers of GPT-Neo from them."""
    found = changed(tmp_path, "EleutherAI/gpt-neo-125m", method="depth", layers="x2")
    assert found["attention_types"] == [[found["attention_layers"], 1]]
    for types in (found["attention_types"], [[["global"] * 8, 1]]):
        with edit_json(tmp_path / "grown" / "config.json") as config:
            config["attention_types"] = types
        (tmp_path / "grown" / "growkit.json").unlink(missing_ok=True)
        kept = types == found["attention_types"]
        assert growkit.verify(tmp_path / "source", tmp_path / "grown", SHORT)["kept"] is kept


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "check",
    [
        sizes_and_kinds_of_layers_change_under_every_name,
        periods_hold_after_several_steps,
        repeated_blocks_of_layers_are_written_out,
    ],
)
def test_single_configs(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_verdict_is_the_same_without_a_manifest(tmp_path: Path, name: str, growth: str) -> None:
    try:
        changed(tmp_path, name, **GROWTHS[growth])
    except InputError as refused:
        pytest.skip(str(refused))
    for _ in range(2):
        assert growkit.verify(tmp_path / "source", tmp_path / "grown", SHORT)["kept"]
        (tmp_path / "grown" / "growkit.json").unlink(missing_ok=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n for n, of in CONFIGS.items() if of["model_type"] in MLX.models])
def test_mlx_gets_the_keys_of_publishers(tmp_path: Path, name: str) -> None:
    """Beside which there may be others, which say the same."""
    save(tmp_path / "source", CONFIGS[name])
    assert growkit.convert(tmp_path / "source", tmp_path / "out", "mlx", verify=SHORT)["kept"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written | CONFIGS[name] == written
