"""Models of all kinds: a sound pair is preserved or refused in a sentence, a fault is caught."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.oracle import CPU, load_model
from growkit.engine.strict import strict_float64
from tests import architectures, odd_pairs
from tests.architectures import TYPES, outcome, save, with_fault
from tests.conftest import seeded

KINDS = {
    "experts": "mixtral",
    "recurrent": "mamba",
    "recurrent and attention": "jamba",
    "several states": "gemma3n_text",
    "what goes along": "glm_moe_dsa",
    "infinity in the config": "bamba",
    "integers in the files": "deepseek_v4",
    "a class with a cache of its own": "minimax",
    "a context that no config names": "whisper",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sampled(5)
def test_a_copy_is_preserved_and_a_fault_is_caught(kind: str, tmp_path: Path) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    source = save(kind, tmp_path / "source")
    shutil.copytree(source, tmp_path / "copy")
    assert outcome(source, tmp_path / "copy").startswith("preserved")
    assert with_fault(source, tmp_path / "spoiled")
    assert outcome(source, tmp_path / "spoiled").startswith("not preserved")


@pytest.mark.usage
def test_experts_are_saved_and_generate(tmp_path: Path) -> None:
    source = save("mixtral", tmp_path / "source")
    modes = {mode["name"]: mode for mode in growkit.verify(source, source, prompts=2)["modes"]}
    assert modes["generate"]["kept"] is True
    assert modes["save and reload"]["kept"] is True


@pytest.mark.parametrize("kind", seeded(1).sample(TYPES, 5))
def test_no_kind_gives_a_false_alarm(kind: str, tmp_path: Path) -> None:
    try:
        source = save(kind, tmp_path / "source")
    except Exception as error:  # what transformers itself cannot make
        pytest.skip(f"{kind}: {error}")
    shutil.copytree(source, tmp_path / "copy")
    assert outcome(source, tmp_path / "copy").startswith(("preserved", "refused"))


@pytest.mark.parametrize("kind", ["jamba", "gemma3n_text", "glm_moe_dsa", "roberta"])
def test_layers_one_at_a_time_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    folder = save(kind, tmp_path / "model")
    ids = torch.randint(2, 60, (12,), generator=torch.Generator().manual_seed(0))
    calls = [Call(ids), Call(ids[:9], cached=True), Call(ids[9:], cached=True, continues=1)]
    with strict_float64(), torch.no_grad():
        model = Layerwise(Checkpoint(folder), torch.float64, CPU, "eager")
        for stage in model.stages(calls):
            states = stage.after
        with model.head() as head:
            found = [head(state) for state in states]
        whole = load_model(folder, torch.float64, CPU, "eager")
        cache = DynamicCache(config=whole.config)
        expected = [whole(ids[None], use_cache=False).logits[0]]
        for part in (ids[:9], ids[9:]):
            expected.append(whole(part[None], cache=cache, use_cache=True).logits[0])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-13 * other.abs().max()


def test_what_is_computed_between_layers_is_no_stack(tmp_path: Path) -> None:
    """RWKV halves its states between layers, if it is asked to: no layer shows that."""
    source = save("rwkv", tmp_path / "source")
    model = Layerwise(Checkpoint(source), torch.float64, CPU, None)
    model.model.config.rescale_every = 1
    for each in model.model.modules():
        if hasattr(each, "layers_are_rescaled"):
            each.layers_are_rescaled = True
            each._rescale_layers = lambda: None
    with pytest.raises(InputError, match="something is computed between layers"):
        list(model.stages([Call(torch.arange(4))]))


def test_what_text_does_not_reach_is_named(tmp_path: Path) -> None:
    if "git" not in TYPES:
        pytest.skip("transformers has no git")
    source = save("git", tmp_path / "source")
    assert "holds weights that text does not reach" in outcome(source, source)


@pytest.mark.parametrize("seed", seeded(2).sample(range(200), 4))
def test_odd_but_sound_models_are_preserved(seed: int, tmp_path: Path) -> None:
    said, what = odd_pairs.outcome(seed, tmp_path)
    assert said.startswith(("preserved", "not sound", "refused: the model in")), (said, what)


def test_sizes_fit_types() -> None:
    assert set(architectures.KINDS) <= set(TYPES) | {"blt"}
