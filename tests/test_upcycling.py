"""Dense models become models with experts, and experts are copied: judged by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.engine.strict import strict_float64
from growkit.training import param_groups
from tests.families import DENSE, FAMILIES, SPARSE, copy_any, save_dense, save_sparse, upcycle_any
from tests.files import edit_config, edit_weights
from tests.models import load_strict, relative_error, save_model, save_random, seeded

QUICK = growkit.Settings(prompts=1, length=16)
EIGHT: dict[str, Any] = {"method": "upcycle", "experts": 8, "top_k": 2}
FOUR: dict[str, Any] = {"num_local_experts": 4}
MORE: dict[str, Any] = {"method": "experts", "experts": "x2"}
FINE: dict[str, Any] = {"method": "upcycle", "experts": 16, "top_k": 4, "granularity": 4}
IDS = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(0))


def alter(folder: Path, ending: str) -> str:
    """Change a tensor of this name; the name of the first one."""
    with edit_weights(folder) as weights:
        name = min(each for each in weights if each.endswith(ending))
        weights[name].mul_(1.5)
    return name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [kind for kind in DENSE if kind != "mistral"])  # see below
def test_any_dense_model(kind: str, tmp_path: Path) -> None:
    assert upcycle_any(kind, sorted(DENSE).index(kind), tmp_path) < 1e-12


@pytest.mark.sampled(2, "qwen3")
@pytest.mark.parametrize("kind", DENSE)
def test_a_static_cache_serves_as_before(kind: str, tmp_path: Path) -> None:
    source, out = save_dense(kind, 0, tmp_path / "source"), tmp_path / "out"
    growkit.grow(source, out, verify=False, **EIGHT)
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with strict_float64():
        before, after = (
            load_strict(folder).generate(IDS, cache_implementation="static", **asked)
            for folder in (source, out)
        )
    assert before.equal(after)
    if kind == "qwen3":  # the control: its class has such a list, that of its target has none
        edit_config(out, layer_types=["full_attention"] * 2)
        with pytest.raises(AttributeError):
            load_strict(out).generate(IDS, cache_implementation="static", **asked)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_more_experts_of_any_model(kind: str, tmp_path: Path) -> None:
    assert copy_any(kind, SPARSE.index(kind), tmp_path) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [EIGHT, FINE], ids=["whole", "fine"])
def test_its_proof_holds_and_misses_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    source, out = save_dense("qwen3", 1, tmp_path / "source"), tmp_path / "out"
    grown = growkit.grow(source, out, verify=QUICK, **options)
    assert grown["kept"]
    assert grown["promise"] == "exact"
    assert grown["verification"].sections.weights.recovered is True
    name = alter(out, "experts.7.up_proj.weight")
    found = growkit.verify(source, out, prompts=1, length=16)
    assert not found["kept"]
    assert found.sections.weights.first_lost_tensor == name


@pytest.mark.parametrize("options", [EIGHT, FINE], ids=["whole", "fine"])
def test_routers_learn_and_experts_part(options: dict[str, Any], tmp_path: Path) -> None:
    """Routers of equal experts have nothing to learn before the first step has parted these."""
    source, out = save_dense("llama", 3, tmp_path / "source"), tmp_path / "out"
    growkit.grow(source, out, verify=False, **options)
    model = load_strict(out)
    routers = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    experts = [p for name, p in model.named_parameters() if name.endswith("experts.down_proj")]
    assert len(routers) == len(experts) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = []
    for _ in range(3):
        optimizer.zero_grad()
        with strict_float64():
            model(IDS, labels=IDS).loss.backward()
        first = first or [float(each.grad.abs().max()) for each in routers]
        optimizer.step()
    assert max(first) < 1e-12 if options is EIGHT else min(first) > 1e-9
    for router, each in zip(routers, experts, strict=True):
        assert int((router.grad.abs().amax(1) > 1e-9).sum()) >= len(router) - 2
        pieces = options.get("granularity", 1)
        copies = each.detach().unflatten(0, (-1, pieces))
        assert float((copies[1:] - copies[:-1]).abs().amax((-1, -2)).min()) > 1e-6


def test_short_formats_bound_what_groups_and_copies_promise(tmp_path: Path) -> None:
    """In bfloat16 the numbers of two of them may be equal where one of them is chosen."""
    source = save_dense("llama", 6, tmp_path / "source", torch.bfloat16)
    some, every = (
        save_model(
            tmp_path / f"{n}", "mixtral", dtype=torch.bfloat16, num_experts_per_tok=n, **FOUR
        )
        for n in (2, 4)
    )
    for of, options, promise in (
        (source, EIGHT, "exact"),
        (source, FINE, "bounded"),
        (source, {**FINE, "dtype": "float32"}, "exact"),
        (some, MORE, "bounded"),
        (some, {**MORE, "dtype": "float32"}, "exact"),
        (every, MORE, "exact"),
    ):
        grown = growkit.grow(of, tmp_path / "out", dry_run=True, **options)
        assert grown["promise"] == promise
        assert bool(grown["lost"]) == (promise == "bounded")


def test_copies_of_two_experts_with_equal_numbers_are_mixed(tmp_path: Path) -> None:
    """In bfloat16, and nowhere else: strict float64 keeps the limit of an exact promise."""
    source = save_model(tmp_path / "s", "mixtral", dtype=torch.bfloat16, **FOUR)
    grown = growkit.grow(source, tmp_path / "o", verify=QUICK, **MORE)
    strict = next(f for f in grown["verification"].findings if f.name == "strict_float64")
    assert grown["kept"]
    assert strict.limit is not None
    assert strict.limit < 1e-9
    router = AutoModelForCausalLM.from_pretrained(tmp_path / "o").model.layers[0].mlp.gate
    states = torch.randn(8000, router.hidden_dim, dtype=torch.bfloat16)
    chosen = (router(states)[2] % 4).sort(-1).values  # the experts that are copied
    assert (chosen[:, ::2] != chosen[:, 1::2]).any()
    with edit_weights(tmp_path / "o") as weights:
        weights["lm_head.weight"].mul_(1.01)
    assert not growkit.verify(source, tmp_path / "o", QUICK)["kept"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("again", [False, True], ids=["at once", "grown again"])
def test_pieces_of_an_mlp_stay_together_in_training(kind: str, again: bool, tmp_path: Path) -> None:
    """Rows of a router that part choose pieces of several MLPs."""
    source, out = save_dense(kind, 1, tmp_path / "source"), tmp_path / "out"
    growkit.grow(source, out, verify=False, **FINE)
    if again:
        source, out = out, tmp_path / "again"
        growkit.grow(source, out, hidden="x2", symmetry="keep", verify=False)
    parted = {}
    for law in (True, False):
        eager: Any = {"experts_implementation": "eager", "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(out, **eager)
        groups = param_groups(model, out, lr=1e-3) if law else model.parameters()
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        for _ in range(3):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
        rows = model.model.layers[0].mlp.gate.weight.unflatten(0, (-1, 4))
        assert not rows[0].equal(rows[1])
        parted[law] = not rows.equal(rows[:, :1].expand_as(rows))
    assert parted == {True: False, False: True}


def test_drop_upcycling_is_another_function(tmp_path: Path) -> None:
    source, out = save_dense("llama", 7, tmp_path / "source"), tmp_path / "out"
    grown = growkit.grow(source, out, verify=False, drop=0.5, **EIGHT)
    assert grown["promise"] == "different"
    assert relative_error(source, out) > 1e-3
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    dense = before["model.layers.0.mlp.up_proj.weight"]
    kept = []
    for expert in range(2):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}."
        rows = (after[prefix + "w3.weight"] == dense).all(1)
        assert int(rows.sum()) == len(dense) // 2
        assert bool(torch.isin(after[prefix + "w3.weight"], dense).all())  # drawn from these
        down = before["model.layers.0.mlp.down_proj.weight"]
        assert rows.equal((after[prefix + "w2.weight"] == down).all(0))
        kept.append(rows)
    assert not kept[0].equal(kept[1])


def save_wide(kind: str, seed: int, folder: Path, **changes: Any) -> Path:
    """A random model whose numbers have float64, as nothing of a router's rows is to round away."""
    config = FAMILIES[kind].any(seeded(seed)) | changes
    return save_random(folder, CONFIG_MAPPING[kind](**config), seed, torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("groups", "promise"), [((1, 1), "exact"), ((2, 1), "exact"), ((2, 2), "")]
)
def test_groups_keep_copies_apart(groups: tuple[int, int], promise: str, tmp_path: Path) -> None:
    """A token of one group meets one copy of every expert, whichever group of copies it is."""
    n_group, topk_group = groups
    source = save_wide(
        "deepseek_v3", 1, tmp_path / "source", n_group=n_group, topk_group=topk_group
    )
    with edit_weights(source) as weights:
        for name in (each for each in weights if each.endswith("correction_bias")):
            weights[name] = torch.rand(4, generator=torch.Generator().manual_seed(1)) / 4
    for symmetry, weaker in (("keep", promise), ("break", promise and "bounded")):
        out = tmp_path / symmetry
        grown = growkit.grow(
            source, out, method="experts", experts="x3", top_k=2, symmetry=symmetry, verify=QUICK
        )
        assert grown["kept"]
        assert grown["promise"] == (weaker or "different")
        assert (relative_error(source, out) < 1e-12) is bool(promise)
    model, used = load_strict(tmp_path / "break"), list[torch.Tensor]()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: used.append(out[2] // 4))
    with strict_float64(), torch.no_grad():
        model(IDS)
    copies = torch.cat(used)
    assert len({*copies.flatten().tolist()}) > 1  # tokens divide among them
    assert bool((copies == copies[:, :1]).all()) is bool(promise)


CHAINS: list[tuple[dict[str, Any], ...]] = [
    ({"experts": "x2", "top_k": 3},),
    ({"experts": "x3", "top_k": 2}, {"experts": "x2"}),
    ({"experts": "x3", "symmetry": "keep"}, {"experts": "x3", "top_k": 2}, {"experts": "x2"}),
    ({"experts": "x2"}, {"experts": "x2"}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", range(len(CHAINS)))
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_router_that_chooses_as_it_was_asked_to_is_proved(
    kind: str, chain: int, tmp_path: Path
) -> None:
    """Also if experts are copied in several steps, which rows of routers count apart."""
    source, out = save_sparse(kind, 1, tmp_path / "source"), tmp_path / "out"
    steps = tuple(growkit.GrowStep("experts", each) for each in CHAINS[chain])
    grown = growkit.run(growkit.Recipe(str(source), steps, str(out), QUICK))
    assert grown["kept"], grown["verification"]["reason"]
    close = chain == 3 or (kind, chain) == ("deepseek_v3", 1)
    assert grown["promise"] in (("exact", "bounded") if close else ("different",))
    if close:
        assert relative_error(source, out) < 1e-5
    chosen = json.loads((out / "config.json").read_text())["num_experts_per_tok"]
    edit_config(out, num_experts_per_tok=chosen - 1)
    found = growkit.verify(source, out, QUICK)
    assert not found["kept"]
    assert f"({chosen - 1} in place of {chosen})" in found["reason"]
