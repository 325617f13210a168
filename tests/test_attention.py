"""What transformers can ask of attention: maps, packed texts, caches, other implementations.

The judge is a forward pass over each whole text, which tests/test_modeling.py holds to the papers.
"""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from growkit.engine.strict import strict_float64
from growkit.extras.differential.modeling import integral_cache, modeling_diff_transformer
from growkit.extras.differential.modeling.differential_attention import _kernels_of_a_row
from tests import papers
from tests.test_modeling import CACHED, LIMIT, build, decode, distance, left_padded, run, tokens

EVERY: dict[str, dict[str, Any]] = {
    **CACHED,
    "column mean": {"integral": "column_mean"},
    "queries normed": {"qk_norm": True, "attention_bias": True},
}


def with_attention(model: Any, implementation: str) -> Any:
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    assert other.config._attn_implementation == implementation
    return other


# --- Maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", EVERY)
def test_eager_attention(variant: str) -> None:
    """The same logits: whole, padded, and with a cache."""
    model, ids, mask = build(**EVERY[variant]), tokens((2, 11)), left_padded((2, 11), 0, 4)
    eager = with_attention(model, "eager")
    assert distance(run(model, ids), run(eager, ids)) < LIMIT
    expected = run(model, ids, attention_mask=mask)
    assert distance(expected, run(eager, ids, attention_mask=mask), mask) < LIMIT
    if variant != "column mean":
        assert distance(expected, decode(eager, ids, mask, [5, 1, 3, 2]), mask) < LIMIT


@pytest.mark.parametrize("variant", [name for name in EVERY if name != "queries normed"])
def test_maps_are_those_of_the_papers(variant: str) -> None:
    """Whatever the implementation; and nobody is given maps without asking."""
    model, ids = build(**EVERY[variant]), tokens((2, 9))
    with strict_float64(), torch.no_grad():
        found = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
        assert model(ids, use_cache=False).attentions is None
    assert distance(run(model, ids), found.logits) < LIMIT
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1
    for text in range(2):
        exact = papers.final_maps(model.state_dict(), model.config, ids[text])
        for expected, maps in zip(exact, found.attentions, strict=True):
            assert maps.shape == (2, model.config.num_signal_heads, 9, 9)
            assert float((expected - maps[text]).abs().max()) < LIMIT
            assert float((expected.transpose(1, 2) - maps[text]).abs().max()) > 1e-3


# --- Packed texts ---------------------------------------------------------------------------------

LENGTHS = (4, 1, 7, 3, 2, 5, 9, 1)


def packed(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Ids and position ids of some texts in one row."""
    return tokens((1, sum(lengths))), torch.cat([torch.arange(n) for n in lengths])[None]


def apart(model: Any, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Logits of each text alone."""
    texts = ids[0].split(lengths)
    return torch.cat([run(model, text[None], use_cache=False) for text in texts], dim=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_texts(variant: str, implementation: str) -> None:
    model = with_attention(build(**EVERY[variant]), implementation)
    ids, positions = packed()
    expected = apart(model, ids, LENGTHS)
    assert distance(expected, run(model, ids, position_ids=positions)) < LIMIT
    assert distance(expected, run(model, ids, use_cache=False)) > 1e-3
    # Rows that are packed differently; the second is one text.
    other = (12, 20)
    ids = torch.cat([ids, tokens((1, 32), seed=1)])
    positions = torch.cat([positions, packed(other)[1]])
    found = run(model, ids, position_ids=positions)
    assert distance(expected, found[:1]) < LIMIT
    assert distance(apart(model, ids[1:], other), found[1:]) < LIMIT


@pytest.mark.parametrize("variant", ["diff", "gated dint", "column mean"])
def test_packed_texts_train_alike(variant: str) -> None:
    model, (ids, positions) = build(**EVERY[variant]).train(), packed()

    def gradients(logits: Tensor) -> list[Tensor]:
        model.zero_grad()
        with strict_float64():
            logits.square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with strict_float64():
        together = gradients(model(ids, position_ids=positions).logits)
        texts = [model(text[None]).logits for text in ids[0].split(LENGTHS)]
        expected = gradients(torch.cat(texts, dim=1))
        crowded = gradients(model(ids).logits)
    assert max(map(distance, expected, together)) < 1e-10
    assert max(map(distance, expected, crowded)) > 1e-3


def test_packed_texts_are_kept_apart_from_a_cache() -> None:
    model, (ids, positions) = build(), packed()
    assert model(ids, position_ids=positions).cache is None
    for inputs in ({"use_cache": True}, {"cache": DynamicCache()}):
        with pytest.raises(ValueError, match="packed documents"):
            model(ids, position_ids=positions, **inputs)
    run(model, ids, position_ids=positions[:, :1] + torch.arange(3, 3 + ids.shape[1]))


# --- Caches ---------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", CACHED)
def test_a_static_cache(variant: str) -> None:
    model, ids = build(**CACHED[variant], pad_token_id=0), tokens((2, 11))
    cache = StaticCache(config=model.config, max_cache_len=16)
    chunks = [run(model, part, cache=cache) for part in ids.split([6, 1, 4], dim=1)]
    assert distance(run(model, ids), torch.cat(chunks, dim=1)) < LIMIT
    cache.reset()  # the control: the last chunk without the others
    assert distance(run(model, ids)[:, 7:], run(model, ids[:, 7:], cache=cache)) > 1e-3
    mask = left_padded((2, 11), 0, 4)
    cache = StaticCache(config=model.config, max_cache_len=16)
    padded = run(model, ids, attention_mask=mask, cache=cache)
    assert distance(run(model, ids, attention_mask=mask), padded, mask) < LIMIT

    def generate(**options: Any) -> Any:
        options |= {"return_dict_in_generate": True, "output_scores": True}
        with strict_float64():
            return model.generate(
                ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options
            )

    expected = generate()
    for options in ({}, {"prefill_chunk_size": 4}):
        found = generate(cache_implementation="static", **options)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert max(map(distance, expected.scores, found.scores)) < LIMIT


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_step_with_a_static_cache() -> None:
    model, ids = build(**CACHED["gated dint"]), tokens((2, 9))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=12)
    logits = [run(model, ids[:, :6], cache=cache)]
    logits += [run(step, ids[:, i : i + 1], cache=cache) for i in range(6, 9)]
    assert distance(run(model, ids), torch.cat(logits, dim=1)) < LIMIT
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


CROPS = {"a chunk": ([8, 3], 5), "single tokens": ([5, 1, 1, 1, 1, 2], 4), "all": ([11], 11)}


def cropped(variant: str, chunks: list[int], tokens_to_remove: int, padded: bool) -> float:
    """How far a model is off that goes on with other tokens after some were taken back."""
    model, ids, mask = build(**CACHED[variant]), tokens((2, 11)), left_padded((2, 11), 0, 2)
    inputs = {"attention_mask": mask} if padded else {}
    cache, first = DynamicCache(config=model.config), 0
    for chunk in chunks:
        last = first + chunk
        seen = {key: each[:, :last] for key, each in inputs.items()}
        run(model, ids[:, first:last], cache=cache, **seen)
        first = last
    cache.crop(-tokens_to_remove)
    left = 11 - tokens_to_remove
    ids = torch.cat([ids[:, :left], tokens((2, tokens_to_remove), seed=3)], dim=1)
    found = run(model, ids[:, left:], cache=cache, **inputs)
    return distance(run(model, ids, **inputs)[:, left:], found, mask[:, left:] if padded else None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_are_taken_back(variant: str, crop: str, padded: bool) -> None:
    assert cropped(variant, *CROPS[crop], padded) < LIMIT


def test_sums_that_are_not_taken_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = integral_cache.column_sums
    monkeypatch.setattr(integral_cache, "column_sums", lambda *a: 0 * exact(*a))
    assert cropped("dint", *CROPS["a chunk"], False) > 1e-3


def test_no_more_tokens_are_taken_back_than_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integral_cache, "CROPPED_ROWS", 4)
    assert cropped("dint", [8, 3], 4, False) < LIMIT
    with pytest.raises(ValueError, match=r"5 tokens cannot be removed.*last 4"):
        cropped("dint", [8, 3], 5, False)


def test_caches_with_a_window_or_of_another_model_are_refused() -> None:
    ids, other = tokens((1, 5)), build(**CACHED["v2"])
    window = Cache(layers=[DynamicSlidingWindowLayer(sliding_window=3) for _ in range(2)])
    with pytest.raises(ValueError, match="has a window"):
        build()(ids, cache=window)
    cache = StaticCache(config=other.config, max_cache_len=8)
    run(other, ids, cache=cache)
    for variant in ("diff", "dint"):
        with pytest.raises(ValueError, match=r"already holds tokens|cannot hold the column sums"):
            run(build(**CACHED[variant]), ids, cache=cache)


def test_masks_of_four_dimensions() -> None:
    """As transformers makes them: true, or 0, for what is seen."""
    for variant in ("diff", "v2", "gated dint", "column mean"):
        model, ids, mask = build(**EVERY[variant]), tokens((2, 7)), left_padded((2, 7), 0, 3)
        seen = mask.bool()[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril()
        added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)
        expected = run(model, ids, attention_mask=mask)
        for given in (seen, added):
            assert distance(expected, run(model, ids, attention_mask=given), mask) < LIMIT
        assert distance(expected, run(model, ids), mask) > 1e-3


# --- Other implementations ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["diff", "grouped", "v2", "softmax", "shared diff"])
def test_another_implementation(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What flash and flex attention are given: padded batches and caches as well."""
    model, ids, mask = build(**CACHED[variant]), tokens((2, 11)), left_padded((2, 11), 0, 4)
    exact = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "other", exact)
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, "other", masks["sdpa"])
    monkeypatch.setattr(modeling_diff_transformer, "EXTERNAL", ("other",))
    other = with_attention(model, "other")
    assert distance(run(model, ids), run(other, ids)) < LIMIT
    expected = run(model, ids, attention_mask=mask)
    assert distance(expected, run(other, ids, attention_mask=mask), mask) < LIMIT
    assert distance(expected, decode(other, ids, mask, [5, 1, 3, 2]), mask) < LIMIT
    texts, positions = packed()
    found = run(other, texts, position_ids=positions)
    assert distance(apart(model, texts, LENGTHS), found) < LIMIT
    # The control: heads that come back in another order.
    kind = modeling_diff_transformer.DiffTransformerAttention
    attend = kind._attend_externally
    monkeypatch.setattr(kind, "_attend_externally", lambda *a, **k: attend(*a, **k).flip(1))
    assert distance(run(model, ids), run(other, ids)) > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", ["diff", "grouped", "v2"])
def test_continuous_batching(variant: str) -> None:
    """Prompts of different lengths at once: each is continued as alone."""
    model = build(**CACHED[variant], pad_token_id=0).float()
    prompts = [tokens((1, n), seed=n)[0].tolist() for n in (5, 9, 3)]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = {
        tuple(prompt): model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    }
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(**options, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=8, max_batch_tokens=64, page_size=32
        ),
        warmup=False,
    )
    assert {tuple(each.prompt_ids): each.generated_tokens for each in found.values()} == expected


def test_engines_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant, other, said in (
        ("diff", "vllm", "is not known to fit its heads"),
        ("dint", "flex_attention", "has no integral"),
    ):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, other, None)
        with pytest.raises(ValueError, match=said):
            build(**CACHED[variant]).set_attn_implementation(other)
    for options in (CACHED["dint"], {"value_head_dim": 12}):
        with pytest.raises(ValueError, match="continuous batching has no room"):
            build(**options).generate_batch([[1, 2]])


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ([], {"flash", "mem_efficient", "math"}),
        ([SDPBackend.CUDNN_ATTENTION], {"cudnn"}),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], {"math"}),
    ],
)
def test_a_row_is_not_attended_by_cudnn_if_there_is_a_choice(
    chosen: list[SDPBackend], left: set[str]
) -> None:
    names = ("flash", "mem_efficient", "math", "cudnn")

    def enabled() -> set[str]:
        return {name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}

    with sdpa_kernel(chosen) if chosen else nullcontext():
        before = enabled()
        with _kernels_of_a_row(torch.device("cuda")):
            assert enabled() == left
        with _kernels_of_a_row(torch.device("cpu")):
            assert enabled() == before
        assert enabled() == before
