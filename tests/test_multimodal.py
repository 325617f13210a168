"""Language models inside of others, judged by the whole model as transformers loads it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from tests.files import edit_json, edit_weights, listed
from tests.models import TOKENS, distance, load_strict, logits_of, randomise

QUICK = growkit.Settings(prompts=1, length=12)
IDS = torch.randint(28, (1, TOKENS), generator=torch.Generator().manual_seed(0))

WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = listed("inside", "wholes")
"""Type, config and sizes to grow to."""


def save_whole(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    kind, config, _ = WHOLES[name]
    model = AutoModelForMultimodalLM.from_config(CONFIG_MAPPING[kind](**(config | more)))
    randomise(model, 0)
    model.to(dtype).save_pretrained(folder)
    return folder


def strict_error(whole: Path, alone: Path) -> float:
    """Of logits of text, against the whole model as transformers loads it."""
    with strict_float64():
        before, report = AutoModelForMultimodalLM.from_pretrained(
            whole, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    assert not report["missing_keys"]
    return distance(logits_of(before.eval(), IDS), logits_of(load_strict(alone), IDS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WHOLES)
def test_it_is_grown_alone(name: str, tmp_path: Path) -> None:
    source, out = save_whole(tmp_path / "source", name, torch.bfloat16), tmp_path / "out"
    result = growkit.grow(source, out, verify=False, **WHOLES[name][2])
    assert {"vision_tower", "audio_tower"} & result["dropped"].keys()
    assert f"holds a {WHOLES[name][0]} model" in result["warnings"][0]
    assert strict_error(source, out) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of PEFT
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_it_is_grown_with_an_adapter_of_the_whole(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = save_whole(tmp_path / "source", name)
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    patterns = {"alpha_pattern": {"language_model.*0.*": 5}, "exclude_modules": ".*vision.*"}
    targets = {"gemma3": r".*language_model.*(q|down)_proj", "mistral3": ["lm_head", "o_proj"]}
    config = peft.LoraConfig(r=2, target_modules=targets[name], **patterns)
    whole = AutoModelForMultimodalLM.from_pretrained(source)
    adapted = peft.get_peft_model(whole, config)
    randomise(adapted, 1)
    adapted.save_pretrained(adapter)
    assert growkit.grow(source, out, adapter=adapter, verify=QUICK, **WHOLES[name][2])["kept"]
    with strict_float64():
        plain = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float64)
    before = peft.PeftModel.from_pretrained(plain, adapter).eval()
    after = peft.PeftModel.from_pretrained(load_strict(out), out / "adapter").eval()
    assert distance(logits_of(before, IDS), logits_of(after, IDS)) < 1e-12


@pytest.mark.sampled(1, "gemma3")
@pytest.mark.usage
@pytest.mark.parametrize("name", ["gemma3", "of an inferred family"])
def test_it_is_proved_alone(name: str, tmp_path: Path) -> None:
    """With the manifest that says how it was made, and without one."""
    source, out = save_whole(tmp_path / "source", name), tmp_path / "out"
    assert growkit.grow(source, out, ffn="x2", verify=QUICK)["kept"]
    assert growkit.verify(source, out, prompts=1, length=12)["kept"]
    (out / "growkit.json").unlink()
    verdict = growkit.verify(source, out, prompts=1, length=12)
    assert verdict["kept"]
    with edit_weights(out) as tensors:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.5
    assert not growkit.verify(source, out, prompts=1, length=12)["kept"]


def test_names_that_the_class_has_in_memory(tmp_path: Path) -> None:
    """``model.language_model``, with the head next to it."""
    source, out = save_whole(tmp_path / "source", "mistral3"), tmp_path / "out"
    file = source / "model.safetensors"
    model = AutoModelForMultimodalLM.from_pretrained(source)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    assert {"lm_head.weight", "model.language_model.norm.weight"} <= tensors.keys()
    save_file(tensors, file, {"format": "pt"})
    growkit.grow(source, out, ffn="x3", verify=False)
    assert strict_error(source, out) < 1e-12


def test_other_names_of_tensors_are_refused(tmp_path: Path) -> None:
    """The class of the whole may rename what that of its language model does not."""
    source = save_whole(tmp_path / "source", "mistral3")
    with edit_weights(source) as tensors:
        for name in [name for name in tensors if "language_model" in name]:
            tensors[name.replace(".layers.", ".blocks.")] = tensors.pop(name)
    with pytest.raises(InputError, match="if mistral3 models have another name for it, save"):
        growkit.grow(source, tmp_path / "out", hidden="x2")


@pytest.mark.parametrize("tied", [True, False])
def test_what_ties_them_is_the_whole(tied: bool, tmp_path: Path) -> None:
    """Mistral 3 is tied where nothing is said, Mistral is not."""
    source = save_whole(tmp_path / "source", "mistral3", tie_word_embeddings=tied)
    out = tmp_path / "out"
    assert growkit.inspect(source)["tied"] is tied
    growkit.grow(source, out, hidden="x2", verify=False)
    assert strict_error(source, out) < 1e-12
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_two_wholes_are_compared_with_all_their_parts(name: str, tmp_path: Path) -> None:
    source, copy = save_whole(tmp_path / "source", name), tmp_path / "copy"

    def reason() -> str:
        found: str = growkit.verify(source, copy, QUICK)["reason"]
        return found

    shutil.copytree(source, copy)
    assert reason().startswith("preserved")
    with edit_json(copy / "config.json") as config:
        config["image_token_index"] = 27
    assert "not preserved: image_token_index in config.json around" in reason()
    shutil.copy(source / "config.json", copy)
    with edit_weights(copy) as tensors:
        tower = next(name for name in tensors if "vision_tower" in name)
        tensors[tower].view(-1)[0] += 1
    assert f"not preserved: tensor {tower} around" in reason()
    shutil.copy(source / "model.safetensors", copy)
    with edit_weights(copy) as tensors:
        next(t for n, t in tensors.items() if "language_model" in n and "down" in n)[0] += 1
    assert "not preserved: the logits differ" in reason()


def test_a_language_model_that_cannot_be_taken_out(tmp_path: Path) -> None:
    source = save_whole(tmp_path / "source", "llava")
    with edit_weights(source) as tensors:
        for name in [*tensors]:
            tensors["other." + name] = tensors.pop(name)
    with pytest.raises(InputError, match=r"inside the llava model in .* cannot be taken out"):
        growkit.verify(source, source)


@pytest.mark.parametrize(("text", "whole", "said"), listed("inside", "refused"))
def test_what_cannot_be_grown_is_refused(
    text: dict[str, Any], whole: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = save_whole(tmp_path / "source", "mistral3")
    with edit_json(source / "config.json") as config:
        config.update(whole)
        config["text_config"] |= text
    with pytest.raises(InputError, match=said):
        growkit.grow(source, tmp_path / "out", hidden="x2")
    assert not (tmp_path / "out").exists()
