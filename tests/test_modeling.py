"""The model against transformers' DiffLlama, and against the papers written out in full."""

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache
from transformers.activations import ACT2FN

import growkit
from growkit.engine.device import CPU, choose_device
from growkit.engine.strict import strict_float64
from growkit.extras.differential.modeling import differential_attention, modeling_diff_transformer
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    SWITCHES,
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)
from tests import families, papers
from tests.files import edit_json, listed
from tests.models import distance, randomise, relative_error, save_model, seeded

LIMIT = 1e-12
VOCABULARY = 29  # of these models
SIZES: dict[str, Any] = listed("modeling", "sizes")
INTEGRALS = SWITCHES["integral"]
CACHED = listed("modeling", "cached")
VARIANTS = CACHED | {"column mean": {"integral": "column_mean"}}


def build(seed: int = 0, **options: Any) -> DiffTransformerForCausalLM:
    """A tiny random model in strict float64; run it in strict float64 as well."""
    with strict_float64():
        model = DiffTransformerForCausalLM(DiffTransformerConfig(**(SIZES | options)))
        randomise(model, seed)
    return model.eval()


def tokens(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(shape: tuple[int, int], *paddings: int) -> Tensor:
    """An attention mask; sequence i begins with as many padding tokens as ``paddings[i]``."""
    return (torch.arange(shape[1]) >= torch.tensor(paddings)[:, None]).long().expand(shape)


def run(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with strict_float64(), torch.no_grad():
        return model(ids, **inputs).logits


# --- DIFF: transformers' DiffLlama ----------------------------------------------------------------


def draw_diffllama(choose: Random) -> dict[str, Any]:
    """A random legal config of DiffLlama."""
    theta = {"rope_type": "default", "rope_theta": choose.choice([100.0, 1e4])}
    config, _ = families.diffllama(choose)
    return SIZES | config | {"rope_parameters": theta, "pad_token_id": 0}


def twins(
    config: dict[str, Any], seed: int, values_as_stored: bool = False
) -> tuple[DiffLlamaForCausalLM, DiffTransformerForCausalLM]:
    """A random DiffLlama, and our model with the same weights.

    DiffLlama stores the first halves of all value heads, then the second halves.
    """
    with strict_float64():
        theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**config, attn_implementation="eager"))
        randomise(theirs, seed)
    ours = build(**config, head_norm="plain")
    halves = (2, config["num_key_value_heads"] // 2, config["head_dim"])
    state = theirs.state_dict()
    for name, weight in state.items():
        if "v_proj" in name and not values_as_stored:
            state[name] = weight.unflatten(0, halves).transpose(0, 1).flatten(0, 2)
    ours.load_state_dict(state)
    return theirs.eval(), ours


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(48))
def test_diff_is_diffllama(seed: int) -> None:
    choose = seeded(seed)
    theirs, ours = twins(draw_diffllama(choose), seed)
    shape = (choose.choice([1, 2, 3]), choose.choice([1, 2, 7, 12]))
    ids = tokens(shape, seed)
    mask = left_padded(shape, *(choose.randrange(shape[1]) for _ in range(shape[0])))
    assert distance(run(theirs, ids), run(ours, ids)) < LIMIT
    expected = run(theirs, ids, attention_mask=mask)
    assert distance(expected, run(ours, ids, attention_mask=mask), mask) < LIMIT
    assert distance(expected, decode(ours, ids, mask, [1] * shape[1]), mask) < LIMIT


@pytest.mark.parametrize("fault", ["values", "lambda_init", "multiplier"])
def test_another_model_is_not_diffllama(fault: str) -> None:
    config = SIZES | {"num_key_value_heads": 4}
    theirs, ours = twins(config, 0, values_as_stored=fault == "values")
    if fault == "lambda_init":
        ours.config.lambda_init = [0.2, 0.2]
    if fault == "multiplier":
        ours.config.head_output_scale = "none"
    assert distance(run(theirs, tokens((2, 9))), run(ours, tokens((2, 9)))) > 1e-3


# --- Every variant: the papers --------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def draw(choose: Random) -> dict[str, Any]:
    """A random legal config, with every switch."""
    options: dict[str, Any] = {
        switch: choose.choice(choices) for switch, choices in SWITCHES.items()
    }
    noise = choose.choice([0, 1, 2, 2, 3, 4])
    signal = noise * choose.choice([1, 1, 2, 3]) or choose.choice([1, 2, 4])
    values = choose.choice(divisors(noise or signal))
    if not noise:
        options |= {"integral": "none", "qk_projection": "full"}
    if options["integral"] == "column_mean":
        options["integral_method"] = "exact"
    own = noise > 0 and options["noise_keys"] == "own"
    layers = choose.choice([1, 2, 3])
    return (
        SIZES
        | options
        | {
            "hidden_size": choose.choice([12, 16, 20]),
            "intermediate_size": choose.choice([7, 24]),
            "num_hidden_layers": layers,
            "num_attention_heads": signal + noise,
            "num_noise_heads": noise,
            "num_key_value_heads": values * (2 if own else 1),
            "head_dim": choose.choice([2, 4, 6, 8]),
            "value_head_dim": choose.choice([None, 1, 3, 4, 7, 12]),
            "lambda_init": [choose.uniform(-0.1, 0.8) for _ in range(layers)],
            "head_norm_eps": choose.choice([None, 1e-5, 1e-2]),
            "rms_norm_eps": choose.choice([1e-5, 1e-2]),
            "shared_rank": choose.choice([1, 2, 3]),
            "hidden_act": choose.choice(["silu", "silu", "poly_norm"]),
            "attention_bias": choose.random() < 0.5,
            "mlp_bias": choose.random() < 0.5,
            "tie_word_embeddings": choose.random() < 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": choose.choice([100.0, 1e4])},
        }
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(180))
def test_any_variant_is_what_the_papers_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = seeded(seed)
    model = build(seed, **draw(choose))
    monkeypatch.setattr(differential_attention, "BLOCK_ROWS", choose.choice([1, 3, 4, 128]))
    shape = (choose.choice([1, 2, 3]), choose.choice([1, 2, 5, 11]))
    ids, state = tokens(shape, seed), model.state_dict()
    assert distance(papers.logits(state, model.config, ids), run(model, ids)) < LIMIT

    # Padding on the left, on the right, or in between, and positions that count it or not.
    mask = left_padded(shape, *(choose.randrange(shape[1]) for _ in range(shape[0])))
    where = choose.choice(["left", "right", "between"])
    if where == "right":
        mask = mask.flip(1)
    if where == "between":
        mask = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6).long()
        mask[:, choose.randrange(shape[1])] = 1
    positions = choose.choice([None, (mask.cumsum(1) - 1).clamp_min(0), torch.arange(shape[1]) + 3])
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    expected = papers.logits(state, model.config, ids, mask, positions)
    found = run(model, ids, attention_mask=mask, position_ids=positions)
    assert found.isfinite().all()
    assert distance(expected, found, mask) < LIMIT


FAULTS: dict[str, dict[str, Any]] = listed("modeling", "faults")
SWAPS: dict[str, tuple[str, list[int]]] = listed("modeling", "heads in another order")


@pytest.mark.parametrize("fault", [*FAULTS, *SWAPS])
def test_the_papers_tell_variants_apart(fault: str) -> None:
    """One switch is thrown, or heads are swapped, for the judge only."""
    options: dict[str, Any] = listed("modeling", "a model that shows faults")
    if fault == "scope":
        options |= {"qk_projection": "shared", "shared_rank": 2}
    model, ids = build(**options), tokens((2, 9))
    expected, state = run(model, ids), model.state_dict()
    assert distance(expected, papers.logits(state, model.config, ids)) < LIMIT
    config = copy.deepcopy(model.config)
    for name, value in FAULTS.get(fault, {}).items():
        setattr(config, name, value)
    projection, order = SWAPS.get(fault, ("", []))
    for name in state:
        if projection and projection in name:
            state[name] = state[name].unflatten(0, (len(order), -1))[order].flatten(0, 1)
    assert distance(expected, papers.logits(state, config, ids)) > 1e-9


# --- The cache ------------------------------------------------------------------------------------


def decode(
    model: DiffTransformerForCausalLM, ids: Tensor, mask: Tensor | None, chunks: list[int]
) -> Tensor:
    """Logits of all tokens, in chunks of the given lengths."""
    cache = DynamicCache(config=model.config)
    logits, first = [], 0
    for chunk in chunks:
        last = first + chunk
        inputs = {} if mask is None else {"attention_mask": mask[:, :last]}
        logits.append(run(model, ids[:, first:last], cache=cache, **inputs))

        first = last
    return torch.cat(logits, dim=1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("padding", ["none", "left", "between"])
@pytest.mark.parametrize("chunks", [[1] * 13, [6, *[1] * 7], [5, 8], [1, 9, 2, 1]], ids=str)
def test_cached_decoding(
    variant: str, padding: str, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential_attention, "BLOCK_ROWS", 3)
    model, ids = build(**CACHED[variant]), tokens((3, 13))
    mask = None if padding == "none" else left_padded((3, 13), 0, 4, 7)
    if mask is not None and padding == "between":  # texts of a batch that goes on after its padding
        mask = mask.roll(-3, dims=1)
    expected = run(model, ids) if mask is None else run(model, ids, attention_mask=mask)
    judge = papers.logits(model.state_dict(), model.config, ids, mask)
    assert distance(judge, expected, mask) < LIMIT
    assert distance(expected, decode(model, ids, mask, chunks), mask) < LIMIT


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache(variant: str, beams: int) -> None:
    model = build(**CACHED[variant], pad_token_id=0)
    ids, mask = tokens((3, 7)), left_padded((3, 7), 0, 2, 5)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    options |= {"num_beams": beams, "num_return_sequences": beams}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    with strict_float64():
        with_cache, without = (
            model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False)
        )
    assert with_cache.sequences.tolist() == without.sequences.tolist()
    # Texts alone would not show beams that go on with the state of others.
    for found, expected in zip(with_cache.scores, without.scores, strict=True):
        assert distance(expected, found) < LIMIT


def test_the_column_mean_generates_without_a_cache() -> None:
    """Greedily, as by hand."""
    model = build(integral="column_mean", pad_token_id=0)
    ids, mask = tokens((2, 7)), left_padded((2, 7), 0, 3)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    with strict_float64():
        text = model.generate(ids, attention_mask=mask, **options)
    for step in range(7, 13):
        seen = functional.pad(mask, (0, step - 7), value=1)
        positions = (seen.cumsum(1) - 1).clamp_min(0)  # which generation counts without the padding
        logits = papers.logits(model.state_dict(), model.config, text[:, :step], seen, positions)
        assert logits[:, -1].argmax(-1).tolist() == text[:, step].tolist()


def test_the_column_mean_refuses_a_cache() -> None:
    plain, ids = build(), tokens((1, 5))
    assert plain(ids).cache is not None
    assert plain.train()(ids).cache is None
    model = build(integral="column_mean")
    assert model.config.use_cache is False
    assert model(ids).cache is None
    for inputs in ({"use_cache": True}, {"cache": DynamicCache()}):
        with pytest.raises(ValueError, match=r"column mean changes with every token.*use_cache"):
            model(ids, **inputs)


@pytest.mark.parametrize("variant", ["diff", "dint", "gated dint"])
def test_a_cache_made_without_a_config(variant: str) -> None:
    """It has no layers before the first token; whatever comes of it must not be a wrong number."""
    model, ids = build(**CACHED[variant]), tokens((2, 9))
    cache, expected = DynamicCache(), run(model, ids)
    assert distance(expected[:, :5], run(model, ids[:, :5], cache=cache)) < LIMIT
    try:
        found = run(model, ids[:, 5:], cache=cache)
    except ValueError as error:
        assert "DynamicCache(config=model.config)" in str(error)  # noqa: PT017
    else:
        assert distance(expected[:, 5:], found) < LIMIT


def test_other_masks_are_refused() -> None:
    model, ids = build(), tokens((2, 8))
    for shape in [(2, 1, 8, 8), (2, 8, 8), (2, 7), (2, 9)]:
        with pytest.raises(ValueError, match="attention_mask has shape"):
            model(ids, attention_mask=torch.ones(shape))
    cache = DynamicCache(config=model.config)
    run(model, ids[:, :5], cache=cache)
    with pytest.raises(ValueError, match="cached tokens included"):  # of the new tokens alone
        run(model, ids[:, 5:], cache=cache, attention_mask=torch.ones(2, 3))


SELECTIONS: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_column_sums_follow_the_batch(selection: str) -> None:
    model, ids, mask = build(**CACHED["dint"]), tokens((3, 6)), left_padded((3, 6), 0, 2, 3)
    change, rows = SELECTIONS[selection]
    cache = DynamicCache(config=model.config)
    run(model, ids, attention_mask=mask, cache=cache)
    change(cache)
    ids = torch.cat([ids[rows], tokens((len(rows), 3), seed=1)], dim=1)
    mask = functional.pad(mask[rows], (0, 3), value=1)
    found = run(model, ids[:, 6:], attention_mask=mask, cache=cache)
    assert distance(run(model, ids, attention_mask=mask)[:, 6:], found) < LIMIT


def test_a_cache_can_be_reset() -> None:
    model, ids = build(**CACHED["dint"]), tokens((2, 6))
    cache = DynamicCache(config=model.config)
    expected = run(model, ids, cache=cache)
    cache.reset()
    other = tokens((3, 4), seed=1)
    assert distance(run(model, other), run(model, other, cache=cache)) < LIMIT
    cache.reset()
    assert torch.equal(expected, run(model, ids, cache=cache))


# --- Gradients ------------------------------------------------------------------------------------


def gradients(
    model: DiffTransformerForCausalLM, logits: Tensor, mask: Tensor, strict: bool = True
) -> dict[str, Tensor]:
    """Of every parameter, for a loss in which every logit of a real token counts differently."""
    parameters = dict(model.named_parameters())
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    with strict_float64() if strict else nullcontext():
        loss = (logits * weights * mask[..., None]).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def both_gradients(
    model: DiffTransformerForCausalLM, ids: Tensor, mask: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By the papers, and by the model."""
    with strict_float64():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    exact = papers.logits(dict(model.named_parameters()), model.config, ids, mask)
    return gradients(model, exact, mask), gradients(model, logits, mask)


def worst(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest distance of a parameter's gradients."""
    assert expected.keys() == found.keys()
    return max(
        distance(gradient, found[name]) if gradient.any() else float(found[name].abs().max())
        for name, gradient in expected.items()
    )


TRAINED: dict[str, dict[str, Any]] = listed("modeling", "trained")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", TRAINED)
@pytest.mark.parametrize("integral", INTEGRALS)
@pytest.mark.parametrize("block", [1, 3, 5, 128])
@pytest.mark.parametrize("paddings", [(0, 0), (0, 4)], ids=["", "padded"])
def test_gradients_are_those_of_the_papers(
    variant: str,
    integral: str,
    block: int,
    paddings: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(differential_attention, "BLOCK_ROWS", block)
    model = build(**TRAINED[variant], integral=integral, rms_norm_eps=1e-2)
    ids, mask = tokens((2, 11)), left_padded((2, 11), *paddings)
    expected, found = both_gradients(model, ids, mask)
    assert all(gradient.any() for gradient in expected.values())
    assert worst(expected, found) < 1e-11


@pytest.mark.parametrize("integral", INTEGRALS[1:])
def test_a_gradient_that_misses_the_integral_is_seen(
    integral: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, mask = build(integral=integral), tokens((2, 11)), left_padded((2, 11), 0, 4)
    exact = papers.INTEGRALS[integral]
    monkeypatch.setitem(papers.INTEGRALS, integral, lambda a1: exact(a1).detach())
    assert worst(*both_gradients(model, ids, mask)) > 1e-3


def attention_inputs(
    rows: int, past: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, and keys and values of two."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, rows, 2), (2, 2, past + rows, 2), (2, 2, past + rows, 3))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its old name
@pytest.mark.parametrize("integral", INTEGRALS)
def test_gradient_checkpointing_changes_no_gradient(
    integral: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential_attention, "BLOCK_ROWS", 4)
    model, ids, mask = build(integral=integral).train(), tokens((2, 11)), left_padded((2, 11), 0, 4)

    def found() -> dict[str, Tensor]:  # strict float64 does not reach into a recomputation
        return gradients(model, model(ids, attention_mask=mask).logits, mask, strict=False)

    expected = found()
    model.gradient_checkpointing_enable()
    assert worst(expected, found()) < LIMIT
    assert model.is_activation_checkpointing


# --- Loss, precision, memory, compilation ---------------------------------------------------------


def test_loss() -> None:
    model, ids = build(integral="causal"), tokens((3, 9))
    labels = ids.masked_fill(left_padded((3, 9), 0, 2, 5) == 0, -100)
    with strict_float64(), torch.no_grad():
        output = model(ids, labels=labels)
    expected = functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    unshifted = functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    assert abs(float(output.loss - expected)) < LIMIT
    assert abs(float(output.loss - unshifted)) > 1e-3
    assert model(ids).loss is None


def test_other_ways_in_and_out() -> None:
    model, ids = build(integral="causal"), tokens((2, 9))
    expected = run(model, ids)
    for kept, rows in ((1, [8]), (3, [6, 7, 8]), (torch.tensor([2, 5]), [2, 5])):
        assert distance(expected[:, rows], run(model, ids, logits_to_keep=kept)) < LIMIT
    with strict_float64(), torch.no_grad():
        embedded = model.model.embed_tokens(ids)
        output = model(inputs_embeds=embedded, output_hidden_states=True)
    assert torch.equal(output.logits, expected)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], embedded)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), expected)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


def test_a_sequence_of_padding_alone_stays_finite() -> None:
    for integral in INTEGRALS:
        model, ids = build(integral=integral), tokens((2, 9))
        mask = left_padded((2, 9), 0, 9)
        found = run(model, ids, attention_mask=mask)
        assert found.isfinite().all()
        assert distance(run(model, ids[:1]), found[:1]) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_kept_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole numbers: their products are exact in half precision, only what follows may round.
    query, key, value = (tensor.round() for tensor in attention_inputs(300, dtype=dtype))
    maps = [
        papers.causal_softmax(query[b, h].double() @ key[b, h // 2].double().T)
        for b in range(2)
        for h in range(4)
    ]
    sums = torch.stack([a1.sum(0) for a1 in maps]).view(2, 4, 300)

    def errors() -> tuple[float, float]:
        gamma = torch.ones(1, 1, 1, 1)
        heads = differential_attention.SignalHeads(query, key, value, gamma, 1.0)
        _, found = differential_attention.causal_integral(heads, None)
        means = differential_attention.column_mean(query, key, 1.0, None)
        return distance(sums, found.columns.double()), distance(sums / 300, means.double())

    assert max(errors()) < 1e-5
    monkeypatch.setattr(differential_attention, "wide", lambda tensor: tensor)
    assert min(errors()) > 1e-3


COMPILED = VARIANTS | {"series": {"integral": "causal", "integral_method": "series"}}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_once_for_training(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of all lengths, checkpoints included, with the gradients of the uncompiled."""
    monkeypatch.setattr(differential_attention, "BLOCK_ROWS", 4)
    for module in (differential_attention, modeling_diff_transformer):
        monkeypatch.setattr(module, "EXACT_ROWS", 8)
    monkeypatch.setattr(differential_attention, "INTERVAL_POWER", 1.2)
    layers = len(COMPILED[variant].get("lambda_init", "1"))
    model = build(**COMPILED[variant], num_hidden_layers=layers).float().train()
    model.activation_checkpointing_enable()
    graphs = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    for rows in (11, 23):
        gradients = []
        for attempt in (model, compiled):
            attempt(ids := tokens((2, rows)), labels=ids, use_cache=False).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        for expected, found in zip(*gradients, strict=True):
            assert distance(expected, found) < 1e-4
    assert graphs.frame_count == 1


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


MEMORY: dict[str, dict[str, Any]] = listed("modeling", "memory")
LENGTH = 1024


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_no_map_is_held(variant: str, dtype: torch.dtype, padded: bool) -> None:
    """Forward and backward; four signal heads in blocks of 128 rows are half a map of 1024."""
    model = build(**MEMORY[variant], num_hidden_layers=1).to(dtype)
    ids = tokens((1, LENGTH))
    mask = left_padded((1, LENGTH), 100 if padded else 0)
    with Largest() as largest:
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    assert largest.numel <= 4 * differential_attention.BLOCK_ROWS * LENGTH < LENGTH**2


def test_the_papers_hold_maps() -> None:
    """And are seen to, by the same means."""
    model, ids = build(num_hidden_layers=1), tokens((1, LENGTH))
    with Largest() as largest, torch.no_grad():
        papers.logits(model.state_dict(), model.config, ids)
    assert largest.numel >= LENGTH**2


# --- The config -----------------------------------------------------------------------------------

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = listed("modeling", "impossible")


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_configs(case: str) -> None:
    options, reason = IMPOSSIBLE[case]
    with pytest.raises(ValueError, match=reason):
        DiffTransformerConfig(**(SIZES | options))


def test_possible_configs_come_back(tmp_path: Path) -> None:
    """Numbers that a class default could be mistaken for are stored as well."""
    default = {"num_hidden_layers": 16, "head_dim": None}
    drawn = [draw(seeded(seed)) for seed in range(30)]
    for options in [
        *drawn,
        {},
        default | {"num_attention_heads": 48, "num_noise_heads": 16, "hidden_size": 2048},
        {"num_attention_heads": 64, "num_noise_heads": 32, "num_key_value_heads": 32},
        {"lambda_type": "projected", "head_output_scale": "none", "use_cache": False},
        {"bos_token_id": None, "eos_token_id": [2, 3], "pad_token_id": 0},
    ]:
        config = DiffTransformerConfig(**options)
        config.save_pretrained(tmp_path)
        back = DiffTransformerConfig.from_pretrained(tmp_path)
        assert back.to_dict() == config.to_dict()
        assert copy.deepcopy(back).to_dict() == config.to_dict()


def test_defaults_follow() -> None:
    config = DiffTransformerConfig(num_attention_heads=12, hidden_size=48)
    assert (config.num_noise_heads, config.num_key_value_heads) == (6, 12)
    assert (config.head_dim, config.value_head_dim, config.head_norm_eps) == (4, 8, 1e-6)
    grouped = DiffTransformerConfig(num_attention_heads=12, num_noise_heads=3)
    assert (grouped.num_signal_heads, grouped.num_key_value_heads) == (9, 6)
    assert grouped.lambda_init[:3] == pytest.approx([0.2, 0.35550906759, 0.47071301834])
    shared = DiffTransformerConfig(num_attention_heads=12, num_noise_heads=3, noise_keys="shared")
    assert (shared.num_value_heads, shared.num_key_value_heads) == (3, 3)


def test_new_weights_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero only where zero is no dead end: biases, and the gate of the integral."""
    torch.manual_seed(0)
    monkeypatch.setitem(ACT2FN, "poly_norm", torch.nn.ReLU)  # as other code may register it
    config = DiffTransformerConfig(
        **(SIZES | {"integral": "causal", "gamma": "gated", "hidden_act": "poly_norm"})
    )
    model = DiffTransformerForCausalLM(config)
    model(ids := tokens((2, 9)), labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        if "lambda_" in name:
            assert 0.02 < float(parameter.detach().std()) < 0.3, name
    attention = model.model.layers[0].self_attn
    assert not attention.gamma_gate.any()
    assert torch.allclose(model.model.layers[0].mlp.act_fn.weight, torch.full((3,), 1 / 3))


def test_gradients_through_a_cache_of_sums_are_refused() -> None:
    model = build(integral="causal")
    with strict_float64():
        cache = model(tokens((1, 5)), use_cache=True).cache
        with pytest.raises(ValueError, match="gradients do not flow through the cache"):
            model(tokens((1, 3)), cache=cache, use_cache=True)


# --- The GPU --------------------------------------------------------------------------------------


DEVICE = choose_device("auto")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == CPU, reason="needs an accelerator")
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_the_gpu(variant: str) -> None:
    """bfloat16 on the device against strict float64 on the CPU: logits, gradients, generation."""
    exact = build(**VARIANTS[variant])
    model = copy.deepcopy(exact).to(DEVICE, torch.bfloat16)
    ids, mask = tokens((2, 300)), left_padded((2, 300), 0, 11)
    expected = run(exact, ids, attention_mask=mask)[mask.bool()]
    found = model(ids.to(DEVICE), attention_mask=mask.to(DEVICE), use_cache=False).logits
    error = (found.cpu().double()[mask.bool()] - expected).square().mean().sqrt()
    assert error < 5e-2 * expected.square().mean().sqrt()
    found.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    prompt = ids[:, :20].to(DEVICE)
    written = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert written.shape == (2, 25)


# --- The key that was called output_multiplier ----------------------------------------------------


def test_configs_have_no_key_that_trainers_read_as_a_scale_of_logits() -> None:
    """TRL takes these for numbers that logits are multiplied with."""
    config = DiffTransformerConfig(output_multiplier="none")
    assert config.head_output_scale == "none"
    assert config.to_dict() == DiffTransformerConfig(head_output_scale="none").to_dict()
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        assert not hasattr(config, key)
    assert config.logits_scaling == 1  # which TRL divides logits by, and so does the class


def test_folders_with_the_former_key(tmp_path: Path) -> None:
    """They are read, grown and verified; what is written has today's key."""
    source = save_model(tmp_path / "old", "diff_transformer", head_output_scale="none")
    with edit_json(source / "config.json") as config:
        config["output_multiplier"] = config.pop("head_output_scale")
    target = tmp_path / "new"
    assert growkit.grow(source, target, hidden="x2")["kept"]
    written = json.loads((target / "config.json").read_text())
    assert "output_multiplier" not in written
    assert written["head_output_scale"] == "none"
    assert relative_error(source, target) < 1e-12
