"""Models that run one layer at a time, held against transformers' own forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, XLMConfig

from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call, Spool
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
from tests.conftest import load_strict, seeded

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied with biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "diffllama": ("diffllama", {}),
    "grouped": ("diff_transformer", {"num_attention_heads": 6, "num_noise_heads": 2}),
    "integral": ("diff_transformer", {"integral": "causal", "num_noise_heads": 2}),
    "shared": ("diff_transformer", {"qk_projection": "shared", "shared_rank": 2}),
    "v2": ("diff_transformer", {"lambda_type": "projected", "noise_keys": "shared"}),
}
TOLERANCE = 1e-13


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(29, (count,), generator=torch.Generator().manual_seed(seed))


def run(folder: Path, calls: list[Call]) -> list[Tensor]:
    with strict_float64():
        model = Layerwise(Checkpoint(folder), torch.float64, torch.device("cpu"), "eager")
        for stage in model.stages(calls):
            states = stage.after
        with model.head() as head:
            return [head(state) for state in states]


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@pytest.fixture(params=["whole", "in parts"])
def matrices(request: pytest.FixtureRequest) -> None:
    if request.param == "in parts":
        request.getfixturevalue("small_parts")


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, make: Callable[..., Path], matrices: None) -> Path:
    kind, options = VARIANTS[request.param]
    sizes = {"num_key_value_heads": None} if kind == "diff_transformer" else {}
    return make(kind, num_hidden_layers=3, seed=seeded(1).randrange(99), **(sizes | options))


def test_logits(folder: Path) -> None:
    prompts = [ids(12), ids(7, 1)]
    found = run(folder, [Call(prompt) for prompt in prompts])
    model = load_strict(folder)
    with strict_float64(), torch.no_grad():
        for prompt, logits in zip(prompts, found, strict=True):
            assert close(logits, model(prompt[None], use_cache=False).logits[0])


def test_cached_decoding(folder: Path) -> None:
    prompt = ids(12)
    parts = [
        Call(prompt[:8], cached=True),
        Call(prompt[8:9], cached=True, continues=1),
        Call(prompt[9:], cached=True, continues=2),
    ]
    found = run(folder, [Call(prompt), *parts])
    model = load_strict(folder)
    cache = DynamicCache(config=model.config)
    with strict_float64(), torch.no_grad():
        for part, logits in zip(parts, found[1:], strict=True):
            expected = model(part.ids[None], cache=cache, use_cache=True).logits[0]
            assert close(logits, expected)
    assert close(torch.cat(found[1:]), found[0])


def test_left_padding(folder: Path) -> None:
    prompt = ids(12)
    mask = torch.tensor([[0] * 4 + [1] * 12])
    positions = torch.tensor([[0] * 4 + list(range(12))])
    padded = torch.cat([torch.zeros(4, dtype=torch.long), prompt])
    inputs = {"attention_mask": mask, "position_ids": positions}
    plain, found = run(folder, [Call(prompt), Call(padded, inputs)])
    assert close(found[4:], plain)


def test_memory_does_not_grow_with_the_number_of_layers(make: Callable[..., Path]) -> None:
    """States are given back once they are read; keys and values of a layer leave their shape."""
    checkpoint = Checkpoint(make("llama", num_hidden_layers=3))
    model = Layerwise(checkpoint, torch.float32, torch.device("cpu"), None)
    calls = [Call(ids(7), cached=True), Call(ids(2), cached=True, continues=0), Call(ids(5))]
    watched: Tensor | None = None
    before: list[Tensor] = []
    for stage in model.stages(calls, watched=2):
        assert stage.given is watched
        assert before == []
        watched, before = stage.after[2], stage.after
        assert len(before) == len(calls)
        for index, layer in enumerate(stage.forward.caches[0].layers):
            states = [layer.keys, layer.values] if layer.is_initialized else []
            assert bool(states) == (stage.layer is not None and index <= stage.layer)
            for state in states:
                assert state.shape[-2] == 9
                assert bool(state.isnan().all()) == (index != stage.layer)
                assert (state.untyped_storage().nbytes() == 4) == (index != stage.layer)


def test_gradients(folder: Path) -> None:
    prompt = ids(12)
    found: dict[str, Tensor] = {}
    with strict_float64():
        layerwise = Layerwise(Checkpoint(folder), torch.float64, torch.device("cpu"), "eager")
        given = Spool()
        for stage in layerwise.stages([Call(prompt)]):
            given.append(stage.after[0])
        layerwise.gradients(prompt, given, found.__setitem__)
    model = load_strict(folder)
    with strict_float64():
        logits = model(prompt[None], use_cache=False).logits[0]
        functional.cross_entropy(logits[:-1], prompt[1:]).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        rows = prompt.unique() if parameter is embedding or parameter is head else slice(None)
        assert close(found[name], expected[name][rows]), name


def test_what_is_no_stack_of_layers(tmp_path: Path) -> None:
    """XLM has lists of attentions, of norms and of MLPs, and computes between them."""
    config = XLMConfig(vocab_size=29, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"one layer at a time \(something is computed between"):
        run(tmp_path / "model", [Call(ids(5))])


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="transformers has no Gemma 4")
def test_what_reads_the_keys_of_other_layers(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_kv_shared_layers=6,
        head_dim=8,
        global_head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    prompt = ids(9)
    calls = [Call(prompt[:6], cached=True), Call(prompt[6:], cached=True, continues=0)]
    found = torch.cat(run(tmp_path / "model", calls))
    model = load_strict(tmp_path / "model")
    with strict_float64(), torch.no_grad():
        assert close(found, model(prompt[None], use_cache=False).logits[0])


def test_a_changed_weight_shows(make: Callable[..., Path]) -> None:
    one, other = make("llama"), make("llama", seed=1)
    assert not close(run(one, [Call(ids(5))])[0], run(other, [Call(ids(5))])[0])
