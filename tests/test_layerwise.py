"""Models that run one layer at a time, held against transformers' own forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import CONFIG_MAPPING, DynamicCache

from growkit.engine import lending
from growkit.engine.calls import Call
from growkit.engine.device import CPU, choose_device
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import load_model
from growkit.extras.optimizer.layerwise_gradients import layerwise_gradients
from growkit.model.checkpoint.reading import Checkpoint
from tests.architectures import TYPES, save
from tests.files import listed
from tests.models import Make, close, save_model, seeded

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = listed("layerwise", "variants")
EXPERTS = ["mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "llama4_text"]
BETWEEN = ["gemma4_text", "glm_moe_dsa"]
"""With more between the layers than hidden states: embeddings for each layer, chosen tokens."""
OTHERS = [*BETWEEN, "jamba", "gemma3n_text", "roberta", "longcat_flash"]


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 29, (count,), generator=torch.Generator().manual_seed(seed))


def opened(folder: Path) -> Layerwise:
    with strict_float64():
        return Layerwise(Checkpoint(folder), torch.float64, CPU)


def run(model: Layerwise, calls: list[Call]) -> list[Tensor]:
    with strict_float64():
        for stage in model.stages(calls):
            states = stage.after
        with model.head() as head:
            return [head(state) for state in states]


@pytest.fixture(params=["whole", "in parts"])
def matrices(request: pytest.FixtureRequest) -> None:
    """Large matrices are cast whole, or in parts: of experts, those that are asked for."""
    if request.param == "in parts":
        request.getfixturevalue("small_parts")


@pytest.fixture(params=[*VARIANTS, *EXPERTS, *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path: Path, matrices: None) -> Path:
    if request.param not in VARIANTS:
        if request.param not in TYPES:
            pytest.skip(f"transformers has no {request.param}")
        return save(request.param, tmp_path / "model")
    kind, options = VARIANTS[request.param]
    sizes = {"num_key_value_heads": None} if kind == "diff_transformer" else {}
    seed = seeded(1).randrange(99)
    return save_model(tmp_path / "model", kind, seed, num_hidden_layers=3, **(sizes | options))


@pytest.mark.sampled(3)
def test_logits_and_cached_decoding(folder: Path) -> None:
    prompts = [ids(12), ids(7, 1), ids(12, 2)]  # two are computed together
    begun = Call(prompts[0][:8], cached=True)
    then = Call(prompts[0][8:9], cached=True, continues=begun)
    parts = [begun, then, Call(prompts[0][9:], cached=True, continues=then)]
    plain, other, third, *cached = run(opened(folder), [*map(Call, prompts), *parts])
    with strict_float64(), torch.no_grad():
        model = load_model(folder, torch.float64, CPU, "eager")
        for prompt, logits in zip(prompts, (plain, other, third), strict=True):
            assert close(logits, model(prompt[None], use_cache=False).logits[0])
        cache = DynamicCache(config=model.config)
        for part, logits in zip(parts, cached, strict=True):
            assert close(logits, model(part.ids[None], cache=cache, use_cache=True).logits[0])
    assert not close(other, plain[: len(other)])  # the control


@pytest.mark.sampled(2)
@pytest.mark.parametrize("folder", VARIANTS, indirect=True)
def test_left_padding(folder: Path) -> None:
    prompt = ids(12)
    mask = torch.tensor([[0] * 4 + [1] * 12])
    positions = torch.tensor([[0] * 4 + list(range(12))])
    padded = torch.cat([torch.zeros(4, dtype=torch.long), prompt])
    inputs = {"attention_mask": mask, "position_ids": positions}
    plain, found = run(opened(folder), [Call(prompt), Call(padded, inputs)])
    assert close(found[4:], plain)


def test_calls_of_one_length_have_the_frequencies_of_their_own_positions(tmp_path: Path) -> None:
    """LongRoPE takes other factors from a position on, which a batch would share."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "rope_parameters": rope}
    folder = save_model(tmp_path / "model", "llama", num_key_value_heads=2, **sizes)
    places = [torch.arange(start, start + 8)[None] for start in (0, 9)]
    calls = [Call(ids(8), {"position_ids": place}) for place in places]
    with strict_float64(), torch.no_grad():
        model = load_model(folder, torch.float64, CPU, "eager")
        for call, logits in zip(calls, run(opened(folder), calls), strict=True):
            assert close(logits, model(call.ids[None], **call.inputs).logits[0])


def gradients(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with strict_float64():
        layerwise_gradients(opened(folder), ids(12), found.__setitem__)
    return found


@pytest.mark.parametrize("kind", EXPERTS[:2])
@pytest.mark.usefixtures("small_parts")
def test_only_the_experts_of_tokens_are_read(
    kind: str, reads: list[tuple[str, int]], tmp_path: Path
) -> None:
    """In files of single experts, or of all of them; a token has two of four."""
    folder = save(kind, tmp_path / "model")
    (logits,) = run(opened(folder), [Call(ids(1))])
    stored = Checkpoint(folder).tensors
    experts = {name: info.elements for name, info in stored.items() if name.count("expert")}
    read = sum(count for name, count in reads if name in experts)
    assert read == sum(experts.values()) / 2
    with strict_float64(), torch.no_grad():
        model = load_model(folder, torch.float64, CPU, "eager")
        assert close(logits, model(ids(1)[None], use_cache=False).logits[0])


@pytest.mark.sampled(4, "in parts-mixtral")
@pytest.mark.parametrize("folder", [*VARIANTS, *EXPERTS, *BETWEEN], indirect=True)
def test_gradients(folder: Path) -> None:
    check_gradients(folder)


def check_gradients(folder: Path, tolerance: float = 1e-12) -> None:
    """Against those of the whole model."""
    prompt, found = ids(12), gradients(folder)
    with strict_float64():
        model = load_model(folder, torch.float64, CPU, "eager")
        logits = model(prompt[None], use_cache=False).logits[0]
        functional.cross_entropy(logits[:-1], prompt[1:]).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        rows = prompt.unique() if parameter is embedding or parameter is head else slice(None)
        if name in found:
            assert close(found[name], expected[name][rows], tolerance), name


def test_memory_does_not_grow_with_the_number_of_layers(make: Make) -> None:
    """States are given back once they are read; keys and values of a layer leave their shape."""
    checkpoint = Checkpoint(make("llama", num_hidden_layers=3))
    model = Layerwise(checkpoint, torch.float32, CPU)
    begun = Call(ids(7), cached=True)
    calls = [begun, Call(ids(2), cached=True, continues=begun), Call(ids(5))]
    before: list[Tensor] = []
    for stage in model.stages(calls):
        assert before == []
        before = stage.after
        assert len(before) == len(calls)
        for index, layer in enumerate(stage.forward.caches[0].layers):
            states = [layer.keys, layer.values] if layer.is_initialized else []
            assert bool(states) == (stage.layer is not None and index <= stage.layer)
            for state in states:
                assert state.shape[-2] == 9
                assert bool(state.isnan().all()) == (index != stage.layer)
                assert (state.untyped_storage().nbytes() == 4) == (index != stage.layer)


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="transformers has no Gemma 4")
def test_what_reads_the_keys_of_other_layers(tmp_path: Path) -> None:
    sizes = {"vocab_size_per_layer_input": 29, "hidden_size_per_layer_input": 8}
    sizes |= {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "global_head_dim": 4}
    save_model(tmp_path / "model", "gemma4_text", **sizes)
    prompt = ids(9)
    begun = Call(prompt[:6], cached=True)
    calls = [begun, Call(prompt[6:], cached=True, continues=begun)]
    found = torch.cat(run(opened(tmp_path / "model"), calls))
    with strict_float64(), torch.no_grad():
        model = load_model(tmp_path / "model", torch.float64, CPU, "eager")
        assert close(found, model(prompt[None], use_cache=False).logits[0])
    check_gradients(tmp_path / "model", 1e-10)  # many layers' rounding


# --- Weights on their way to the device: each is read once, the next layer's while one computes ---

CALLS = [Call(torch.arange(9)), Call(torch.arange(5))]


@pytest.mark.gpu
@pytest.mark.skipif(choose_device("auto", torch.float64) == CPU, reason="needs an accelerator")
def test_fetched_on_the_gpu_it_is_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, device = make("llama", num_hidden_layers=4, hidden_size=64), choose_device("auto")
    fetched = run(Layerwise(Checkpoint(folder), torch.float64, device), CALLS)
    monkeypatch.setattr(lending.Lender, "fetch", lambda self, module, names: None)
    plain = run(Layerwise(Checkpoint(folder), torch.float64, device), CALLS)
    assert all(one.equal(other) for one, other in zip(plain, fetched, strict=True))
