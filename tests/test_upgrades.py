"""Conversions to other architectures, judged by the classes of transformers that have them."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import growkit
from growkit import ConvertStep, GrowStep, Recipe
from growkit.engine.strict import strict_float64
from growkit.extras.upgrades.modeling_latent_granite import LatentGraniteHeadNorm
from growkit.model.families.family import families
from tests.families import SIZES, coin, one_of
from tests.files import edit_json, edit_weights, listed
from tests.models import (
    distance,
    load_strict,
    logits_of,
    relative_error,
    save_model,
    save_random,
    seeded,
)

QUICK = growkit.Settings(prompts=2, length=24)

SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": coin},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "ministral": {"layer_types": ["full_attention"] * SIZES["num_hidden_layers"]},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": coin},
    "granite": {
        "attention_bias": coin,
        "mlp_bias": coin,
        "attention_multiplier": one_of(0.5, 0.3, 1 / 64),
        "embedding_multiplier": one_of(1.0, 12.0),
        "residual_multiplier": one_of(1.0, 0.22),
        "logits_scaling": one_of(1.0, 8.0, 13.0),
    },
}

ROPES: list[dict[str, Any]] = listed("upgrades", "ropes")


def grouped_query(kind: str, choose: Random) -> dict[str, Any]:
    """A random config of a type, with what the class of latent attention can have."""
    kv_heads, width = choose.choice([1, 2, 3, 4]), choose.choice([4, 6, 8])
    heads = kv_heads * choose.choice([1, 2, 3])
    rope = {**choose.choice(ROPES), "rope_theta": choose.choice([1e4, 5e5])}
    if rope["rope_type"] == "default" and coin(choose):
        factors = [[1 + choose.random() * more for _ in range(width // 2)] for more in (1, 4)]
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 16}
        rope |= {"short_factor": factors[0], "long_factor": factors[1]}
    switches = SWITCHES[kind]
    switches = {k: v(choose) if callable(v) else v for k, v in switches.items()}
    return {
        **SIZES,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "hidden_size": heads * choose.choice([4, 8]),
        "intermediate_size": 12,
        "tie_word_embeddings": coin(choose),
        "rope_parameters": rope,
        **switches,
    }


DEEPER = GrowStep("depth", {"layers": "x2"})

UPGRADES = {
    "mla": (
        ["deepseek_v3", "latent_granite"],
        ["self_attn.kv_a_proj_with_mqa.bias", "self_attn.kv_b_proj.weight"],
    ),
    "hybrid": (["falcon_h1"], ["self_attn.o_proj.weight", "mamba.out_proj.weight"]),
    "hyper-connections": (["hyper_llama"], ["attn_hc.base", "ffn_hc.base", "mlp.up_proj.weight"]),
}
"""By name, the classes and tensors whose faults must be noticed."""


SOURCES = {
    "mla": ["llama", "mistral", "qwen2", "qwen3", "granite"],
    "hybrid": ["llama", "mistral", "qwen2", "granite", "ministral"],
    "hyper-connections": ["llama", "mistral", "mixtral", "qwen2", "qwen3"],
}
PAIRS = [(upgrade, kind) for upgrade, kinds in SOURCES.items() for kind in kinds]


@pytest.mark.sampled(2, "hyper-connections-mixtral-8")
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize(("upgrade", "kind"), PAIRS)
def test_an_upgrade_changes_nothing_and_learns(
    upgrade: str, kind: str, seed: int, tmp_path: Path
) -> None:
    choose, source, out = seeded(seed), tmp_path / "source", tmp_path / "out"
    config, dtype = grouped_query(kind, choose), one_of(torch.float32, torch.bfloat16)(choose)
    save_random(source, CONFIG_MAPPING[kind](**config), seed, dtype)
    if coin(choose):  # as transformers 4 spells it
        with edit_json(source / "config.json") as spelled:
            rope = spelled.pop("rope_parameters")
            spelled["rope_theta"] = rope.pop("rope_theta")
            spelled["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if "use_sliding_window" in config:
        with edit_json(source / "config.json") as spelled:
            spelled["sliding_window"] = 8  # which the class ignores, and files often have
    streams = {"streams": choose.choice("248")} if upgrade == "hyper-connections" else {}
    converted = growkit.convert(source, out, upgrade, verify=QUICK, **streams)
    assert converted["kept"], converted["verification"]["reason"]
    assert converted["promise"] == "exact"
    assert relative_error(source, out) < 1e-12
    keys = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    assert ("rope_parameters" in keys[0]) == ("rope_parameters" in keys[1])
    model, (model_types, faults) = load_strict(out), UPGRADES[upgrade]
    assert model.config.model_type in model_types
    ids = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with strict_float64():
        for _ in range(2):  # what is before a zero trains from the second step on
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name
    (out / "growkit.json").unlink()
    unaided = growkit.verify(source, out, QUICK)
    assert unaided["kept"], unaided["reason"]
    with edit_weights(out) as weights:
        names = [name for tensor in faults if (name := f"model.layers.1.{tensor}") in weights]
        weights[choose.choice(names)].mul_(1.5).add_(0.01)
    assert relative_error(source, out) > 1e-6  # the control
    assert not growkit.verify(source, out, QUICK)["kept"]


def test_other_frequencies_are_another_model(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    config = grouped_query("llama", seeded(1)) | {"rope_parameters": {"rope_type": "default"}}
    save_random(source, CONFIG_MAPPING["llama"](**config), 0)
    assert growkit.convert(source, out, "mla", verify=QUICK)["kept"]
    with edit_json(out / "config.json") as written:
        written["rope_parameters"]["long_factor"][-1] *= 2  # beyond the context of the prompts
    (out / "growkit.json").unlink()
    verdict = growkit.verify(source, out, QUICK)
    assert not verdict["kept"]
    assert "rope_parameters" in verdict["reason"]


def test_a_setting_that_a_config_leaves_to_its_class_is_known() -> None:
    """Descriptions of what becomes a more general class have the defaults of its class."""
    checked = set()
    for family in families().values():
        dense = family.experts.dense if family.experts else {}
        for known in (*family.upgrades.values(), dense):
            for kind, rest in known.items():
                for key, values in rest.only.items():
                    default = getattr(CONFIG_MAPPING[kind](), key)
                    assert rest.assumed.get(key, values[0]) == default, (family.name, kind, key)
                    checked.add((kind, key, default in values))
    assert {("mistral", "sliding_window", False), ("llama", "mlp_bias", True)} <= checked


@pytest.mark.parametrize("factor", [1.0, 12.0])
def test_a_factor_that_embeddings_in_place_of_ids_lose_is_told(
    factor: float, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "source", "granite", embedding_multiplier=factor)
    out, ids = tmp_path / "out", torch.arange(12)[None]
    warnings = growkit.convert(source, out, "hybrid", verify=False)["warnings"]
    assert [("inputs_embeds" in warning) for warning in warnings] == [True] * (factor != 1)
    logits = []
    for model, scale in ((load_strict(source), 1.0), (load_strict(out), factor)):
        with strict_float64(), torch.no_grad():
            embeddings = model.get_input_embeddings()(ids)
            logits.append(model(inputs_embeds=embeddings * scale).logits)
    assert distance(*logits) < 1e-12


def with_few_components(folder: Path, config: dict[str, Any], choose: Random) -> tuple[int, str]:
    """Give the keys and values of a folder few components; return the rank and pairs of latents."""
    kv_heads, width = config["num_key_value_heads"], config["head_dim"]
    counts = [choose.randint(0, kv_heads) for _ in range(width // 2 - 1)] + [1]
    latent = choose.randint(2, min(kv_heads * width, config["hidden_size"]) - 1)
    random = torch.Generator().manual_seed(choose.randrange(1000))

    def normal(*shape: int, dtype: torch.dtype = torch.complex128) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=dtype)

    with edit_weights(folder) as weights:
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn."
            keys, values = (weights[f"{prefix}{name}_proj.weight"] for name in "kv")
            bias = weights.get(f"{prefix}k_proj.bias", torch.zeros(len(keys)))
            inputs = keys.shape[1]
            rows = [normal(kv_heads, count) @ normal(count, inputs + 1) for count in counts]
            halves = torch.view_as_real(torch.stack(rows, 1))  # [heads, pairs, inputs + 1, 2]
            full = halves.movedim(-1, 1).flatten(0, 2) / 8
            keys.copy_(full[:, :-1])
            bias.copy_(full[:, -1])
            left = normal(len(values), latent, dtype=torch.float64)
            values.copy_(left @ normal(latent, inputs, dtype=torch.float64) / 8)
    return 1 + latent + 2 * sum(counts), ",".join(map(str, counts))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "granite"])
def test_latents_hold_all_components_that_they_have_room_for(
    kind: str, seed: int, tmp_path: Path
) -> None:
    choose, source, out = seeded(seed), tmp_path / "source", tmp_path / "out"
    config = grouped_query(kind, choose)
    save_random(source, CONFIG_MAPPING[kind](**config), seed, torch.float64)
    rank, pairs = with_few_components(source, config, choose)
    converted = growkit.convert(source, out, "mla", rank=rank, pairs=pairs, verify=QUICK)
    assert converted["kept"], converted["verification"]["reason"]
    assert converted["promise"] == "bounded"
    assert relative_error(source, out) < 1e-10
    latent = load_strict(out)
    with strict_float64():
        cache = latent(torch.arange(5)[None]).past_key_values.layers[0]
    assert cache.keys[0, 0, 0].numel() + cache.values[0, 0, 0].numel() == rank
    attention, ending = choose.choice(
        [("kv_a_proj_with_mqa", "weight"), ("kv_a_proj_with_mqa", "bias"), ("kv_b_proj", "weight")]
    )
    with edit_weights(out) as weights:
        weights[f"model.layers.1.self_attn.{attention}.{ending}"].mul_(1.5).add_(0.01)
    assert relative_error(source, out) > 1e-6  # the control
    assert not growkit.verify(source, out, QUICK)["kept"]
    smaller = tmp_path / "smaller"
    growkit.convert(source, smaller, "mla", rank=rank - 1, pairs=pairs, verify=False)
    assert relative_error(source, smaller) > 1e-6  # the control


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("upgrade", "after"),
    [
        ("mla", [DEEPER, GrowStep("upcycle", {"experts": "4"})]),
        ("hybrid", [DEEPER, GrowStep("hypercloning", {"hidden": "x2"})]),
        (
            "hyper-connections",
            [GrowStep("upcycle", {"experts": "4"}), GrowStep("hypercloning", {"hidden": "x2"})],
        ),
    ],
)
def test_growth_and_upgrades_are_one_recipe(
    upgrade: str, after: Sequence[GrowStep], tmp_path: Path
) -> None:
    config = grouped_query("llama", seeded(2)) | {"tie_word_embeddings": False}
    source, out = tmp_path / "source", tmp_path / "out"
    save_random(source, CONFIG_MAPPING["llama"](**config), 0)
    wider = GrowStep("hypercloning", {"hidden": "x2"})
    steps = (wider, ConvertStep(upgrade, {}), *after)
    assert growkit.run(Recipe(str(source), steps, str(out), QUICK))["kept"]
    assert relative_error(source, out) < 1e-12


def in_steps(model: Any, ids: torch.Tensor, real: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits of the real tokens, of which the last four come one by one."""
    rows = []
    for first, end in ((0, 8), *((at, at + 1) for at in range(8, 12))):
        cached = {"cache": cache, "attention_mask": real[:, :end]}
        rows.append(model(ids[:, first:end], **cached).logits)
    return torch.cat(rows, 1)[real.bool()]


def test_a_mixer_beside_differential_attention_is_that_beside_softmax(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    softmax, plain, diff = (tmp_path / name for name in ("softmax", "plain", "diff"))
    growkit.convert(source, softmax, "hybrid", verify=False)
    growkit.convert(source, plain, "diff", verify=False)
    steps = (ConvertStep("diff", {}), ConvertStep("hybrid", {}))
    assert growkit.run(Recipe(str(source), steps, str(diff), QUICK))["kept"]
    (diff / "growkit.json").unlink()
    unaided = growkit.verify(plain, diff, QUICK)
    assert unaided["kept"], unaided["reason"]
    ids, real = torch.arange(24).view(2, 12), torch.ones(2, 12)
    real[0, :5] = 0  # padding
    for out in (softmax, diff):
        with edit_weights(out) as weights:
            generator = torch.Generator().manual_seed(0)
            for tensor in sorted(weights):
                if ".mamba." in tensor:
                    weights[tensor].normal_(0, 0.5, generator=generator)
    falcon, model = load_strict(softmax), load_strict(diff)
    assert relative_error(source, diff) > 1e-3
    assert relative_error(softmax, diff) < 1e-12
    with strict_float64(), torch.no_grad():
        expected = in_steps(falcon, ids, real, DynamicCache(config=falcon.config))
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, 16)):
            assert distance(expected, in_steps(model, ids, real, cache)) < 1e-12
        asked = {"attention_mask": real.long(), "max_new_tokens": 4, "do_sample": False}
        generated = model.generate(ids, **asked, cache_implementation="static")
        assert generated.equal(falcon.generate(ids, **asked))
        alone = torch.cat([falcon(text).logits for text in ids.split(6, 1)], 1)
        packed = model(ids, position_ids=torch.arange(6).repeat(2)[None]).logits
        assert distance(alone, packed) < 1e-12
        assert distance(alone, model(ids).logits) > 1e-3  # the control
    with edit_weights(diff) as weights:
        weights["model.layers.1.mamba.D"].add_(0.01)
    assert relative_error(softmax, diff) > 1e-6  # the control
    type(model)(model.config)  # as a new model starts


def mixed_by_hand(layer: Any, connection: Any, streams: torch.Tensor, block: Any) -> torch.Tensor:
    """One block between its hyper-connections, from the formulas alone.

    Args:
        layer: config of the model.
        connection: holds the projection, the base and the scales.
        streams: [tokens, streams, hidden].
        block: maps states, [tokens, hidden], to outputs of the same shape.
    """
    count = layer.hc_mult
    flat = streams.flatten(1)
    flat = flat / (flat.square().mean(1, keepdim=True) + layer.rms_norm_eps).sqrt()
    parts = (flat @ connection.fn.T).split([count, count, count**2], 1)
    bases = connection.base.split([count, count, count**2])
    pre, post, mixing = (
        part * scale + base
        for part, scale, base in zip(parts, connection.scale, bases, strict=True)
    )
    output = block((pre.sigmoid()[:, :, None] * streams).sum(1))
    mixing = mixing.view(-1, count, count).softmax(2)
    for step in range(layer.hc_sinkhorn_iters):
        mixing = mixing if not step else mixing / mixing.sum(2, keepdim=True)
        mixing = mixing / mixing.sum(1, keepdim=True)
    added = 2 * post.sigmoid()[:, :, None] * output[:, None]
    return added + torch.einsum("tjk,tjd->tkd", mixing, streams)


def logits_by_hand(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt, [tokens, vocabulary], with Llama's own attention and MLPs."""
    inner, config = model.model, model.config
    state = inner.embed_tokens(ids)
    positions = inner.rotary_emb(state[None], torch.arange(len(ids))[None])
    mask = torch.full((len(ids),) * 2, -torch.inf).triu(1)[None, None]
    streams = state[:, None].expand(-1, config.hc_mult, -1)
    for layer in inner.layers:

        def attend(read: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            normed = layer.input_layernorm(read)[None]
            return layer.self_attn(normed, position_embeddings=positions, attention_mask=mask)[0][0]

        def widen(read: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            return layer.mlp(layer.post_attention_layernorm(read))

        streams = mixed_by_hand(config, layer.attn_hc, streams, attend)
        streams = mixed_by_hand(config, layer.ffn_hc, streams, widen)
    flat, head = streams.flatten(1), inner.hc_head
    flat = flat / (flat.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
    pre = (flat @ head.hc_fn.T * head.hc_scale + head.hc_base).sigmoid()
    return model.lm_head(inner.norm((pre[:, :, None] * streams).sum(1)))


@pytest.mark.parametrize("streams", ["2", "4", "8"])
def test_streams_that_have_parted_compute_what_the_formulas_say(
    streams: str, tmp_path: Path
) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    growkit.convert(source, out, "hyper-connections", streams=streams, verify=False)
    with edit_weights(out) as weights:
        generator = torch.Generator().manual_seed(0)
        for name in weights:
            if "_hc." in name or (".hc_" in name and not name.endswith("fn")):
                weights[name].normal_(0, 0.5, generator=generator)
    model, ids = load_strict(out), torch.arange(24)
    with strict_float64(), torch.no_grad():
        expected = logits_by_hand(model, ids)
    assert distance(expected, logits_of(model, ids[None])) < 1e-12
    with torch.no_grad():
        model.model.layers[1].attn_hc.base[-1] += 0.1
    assert distance(expected, logits_of(model, ids[None])) > 1e-6  # the control
    new = type(model)(model.config).model.layers[0].attn_hc  # as DeepSeek-V4 starts
    assert (new.scale.tolist(), bool(new.base.any())) == ([1] * 3, False)
    assert 0.01 < new.fn.std() < 0.03
    growkit.grow(out, tmp_path / "wider", hidden="x2", verify=False)
    assert relative_error(out, tmp_path / "wider") < 1e-12


def test_latent_attention_is_that_of_deepseek_with_norms_as_in_qwen3(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 3, "q_lora_rank": 6, "kv_lora_rank": 5, "v_head_dim": 8}
    sizes |= {"qk_rope_head_dim": 12, "qk_nope_head_dim": 4, "first_k_dense_replace": 2}
    config = SIZES | sizes | {"num_attention_heads": 3, "hidden_size": 12, "intermediate_size": 12}
    theirs = save_random(tmp_path / "theirs", CONFIG_MAPPING["deepseek_v3"](**config), 0)
    ours = copytree(theirs, tmp_path / "ours")
    with edit_json(ours / "config.json") as written:
        written |= {"model_type": "latent_granite", "architectures": ["LatentGraniteForCausalLM"]}
    growkit.grow(ours, tmp_path / "wider", hidden="x2", verify=False)
    assert relative_error(theirs, tmp_path / "wider") < 1e-12
    rows, weight = torch.randn(5, 12), torch.randn(12)

    def by_head(halves: torch.Tensor) -> torch.Tensor:
        return halves.unflatten(-1, (2, 3, 2)).transpose(-3, -2).flatten(-2)

    for heads, inputs in ((3, rows), (1, rows * torch.tensor([0, 0, 1, 1, 0, 0]).repeat(2))):
        norm = LatentGraniteHeadNorm(12, heads, 4, 1e-6)
        norm.weight.data.copy_(weight)
        expected = Qwen3RMSNorm(4)(by_head(inputs)) * by_head(weight)
        assert torch.allclose(by_head(norm(inputs)), expected, atol=1e-5)
        assert not torch.allclose(by_head(norm(inputs * 0.9 + 0.1)), expected, atol=1e-5)
