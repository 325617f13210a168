"""Ranks that are found out: the smallest that keeps a tolerance or an energy, and one per layer.

Costs are judged by really converting, loading with transformers, and plain torch; energies by
torch's singular values of the files' tensors.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.cli.demo import MODEL, training_text
from growkit.engine.prompts import DOCUMENT_SEPARATOR, make_prompts
from growkit.engine.recipe_planning import plan_recipe
from growkit.engine.strict import strict_float64
from growkit.extras.calibration import smallest_rank
from growkit.extras.differential.conversions.shared_diff import SHRINKAGES
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.model.checkpoint.folder import read_json
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import ConvertStep, Recipe
from tests.commands import cli
from tests.files import folder_bytes, listed, with_tokenizer
from tests.models import load_strict, relative_error, save_model

LIMIT = 1e-12
TEXT = "Nothing is lost when a model grows: every weight is split, and the parts sum to it. " * 40
SIZES = {"vocab_size": 256, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 24}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return with_tokenizer(save_model(tmp_path / "source", "diffllama", **SIZES))


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT[:512])  # eight windows: as many as costs are asked on
    return str(file)


def plan(source: Path, dtype: str | None = None, **options: Any) -> Any:
    """What would be done, and what was found out."""
    step = ConvertStep("shared-diff", options)
    return plan_recipe(Recipe(str(source), (step,), "nowhere", dtype=dtype), Checkpoint(source))


def ranks_of(way: Any) -> list[int]:
    config = way.lineage.target.config
    found = config["shared_rank"]
    return found if isinstance(found, list) else [found] * config["num_hidden_layers"]


def convert(source: Path, target: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"verify": False, "overwrite": True} | options
    return growkit.convert(source, target, "shared-diff", **given)


def measured(source: Path, target: Path, text: str | None, **options: Any) -> float:
    """The KL that the proof measures, in nats per token."""
    verification = convert(source, target, **options, verify=Settings(text))["verification"]
    assert verification["kept"]
    return float(verification.sections.logits.strict_float64.kl_nats_per_token)


def probabilities(folder: Path, windows: Sequence[Tensor]) -> list[Tensor]:
    """Of every next token, [tokens, vocabulary] for each window, in plain torch."""
    model = load_strict(folder)
    with strict_float64(), torch.no_grad():
        return [model(ids[None], use_cache=False).logits[0].softmax(-1) for ids in windows]


def divergence(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """KL(expected ‖ found), nats per token."""
    with strict_float64():
        pairs = zip(expected, found, strict=True)
        total = sum(float((p * (p / q).log()).sum()) for p, q in pairs)
    return total / sum(len(p) for p in expected)


@pytest.mark.parametrize("cost", [1.0, float("nan"), float("inf")])
def test_no_rank_keeps_it(cost: float) -> None:
    with pytest.raises(InputError, match=r"no rank keeps a tolerance of 0\.5: rank 20 still costs"):
        smallest_rank(20, lambda ranks: dict.fromkeys(ranks, cost), 0.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("scope", "weigh"), [("head", True), ("layer", False), ("all_heads", True)]
)
def test_what_ranks_cost(scope: str, weigh: bool, source: Path, text: str, tmp_path: Path) -> None:
    """Brute force: convert with every rank that was tried, load both, compare.

    Sources run as transformers runs them, with float32 inside; hence the tolerance.
    """
    options: dict[str, Any] = {"scope": scope}
    if weigh:
        options |= {"calibration": text}
    if weigh and scope == "all_heads":  # each is a search
        options |= {"shrinkage": 0.3}
    found = plan(source, "float64", rank="auto", tolerance=0.01, **options).kl_by_rank
    windows = make_prompts(
        Settings(text if weigh else None), source, read_json(source / "config.json")
    ).windows
    assert len(found) > 2
    ranks = sorted(found)
    expected = probabilities(source, windows)
    for rank in {ranks[0], ranks[1], ranks[-1]} if scope == "all_heads" else ranks:
        cost = found[rank]
        convert(source, tmp_path / "out", dtype="float64", rank=rank, **options)
        judged = divergence(expected, probabilities(tmp_path / "out", windows))
        assert judged == pytest.approx(cost, rel=1e-4, abs=1e-11)


@pytest.mark.sampled(1, "head-0.05")
@pytest.mark.parametrize("tolerance", [0.05, 0.01])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_a_tolerance_is_kept(
    scope: str, tolerance: float, source: Path, text: str, tmp_path: Path
) -> None:
    options = {"scope": scope, "calibration": text}
    settled = measured(source, tmp_path / "out", text, rank="auto", tolerance=tolerance, **options)
    assert settled <= tolerance
    (step,) = read_json(tmp_path / "out" / "growkit.json")["recipe"]["steps"]
    rank = int(step["rank"])
    assert rank == read_json(tmp_path / "out" / "config.json")["shared_rank"] > 1
    assert measured(source, tmp_path / "one-below", text, rank=rank - 1, **options) > tolerance


def nearly_equal(source: Path, rank: int) -> None:
    """Let signal and noise heads of layer 1 differ by little but for a matrix of this rank."""
    state = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in ("q_proj", "k_proj"):
        weight = state[f"model.layers.1.self_attn.{name}.weight"]
        rows, hidden = weight.shape
        half = weight[: rows // 2]
        left, right = (
            torch.randn(shape, generator=generator) for shape in ((rows // 2, rank), (rank, hidden))
        )
        weight[rows // 2 :] = half + 1e-3 * weight[rows // 2 :] + left @ right / 4
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})


def expected_ranks(source: Path, energy: float, root: Sequence[Tensor] | None = None) -> list[int]:
    """Smallest r with Σ_{i > 2r} σᵢ² at most (1 - energy) of all, over the pairs of a layer."""
    state, ranks = load_file(source / "model.safetensors"), []
    for layer in range(2):
        squares = []
        for name in ("q_proj", "k_proj"):
            weight = state[f"model.layers.{layer}.self_attn.{name}.weight"].double()
            # DiffLlama stores signal heads before noise heads as well.
            first, second = weight.view(2, -1, SIZES["head_dim"], weight.shape[1])
            for d in first - second:
                seen = d.T if root is None else root[layer] @ d.T
                squares.append(torch.linalg.svd(seen).S.square())
        total = sum(float(s.sum()) for s in squares)
        rest = [sum(float(s[2 * r :].sum()) for s in squares) for r in range(1, 5)]
        ranks.append(1 + sum(each > (1 - energy) * total for each in rest))
    return ranks


@pytest.mark.parametrize("energy", [0.3, 0.8, 0.95, 1])
def test_an_energy_is_kept_by_every_layer(energy: float, source: Path) -> None:
    nearly_equal(source, 2)
    expected = expected_ranks(source, energy)
    way = plan(source, rank="auto", energy=energy)
    assert ranks_of(way) == expected
    assert isinstance(way.lineage.target.config["shared_rank"], list) == (len(set(expected)) > 1)


def test_an_energy_is_that_of_the_inputs(source: Path, text: str) -> None:
    """Judged by hooks on the real model, and another rank than all inputs alike would give."""
    nearly_equal(source, 3)
    windows = make_prompts(Settings(text), source, read_json(source / "config.json")).windows
    model = load_strict(source)
    seen: list[list[Tensor]] = [[], []]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_pre_hook(
            lambda module, args, index=index: seen[index].append(args[0][0])
        )
    with strict_float64(), torch.no_grad():
        for ids in windows:
            model(ids[None], use_cache=False)
    inputs = [torch.cat(each) for each in seen]
    differ = 0
    for energy in (0.6, 0.8, 0.9, 0.95, 0.99):
        found = ranks_of(plan(source, rank="auto", energy=energy, calibration=text))
        assert found == expected_ranks(source, energy, inputs), energy
        differ += found != expected_ranks(source, energy)
    assert differ


@pytest.mark.sampled(1, "[1, 3]-head")
@pytest.mark.parametrize(
    ("ranks", "scope"), [([1, 3], "head"), ([4, 2], "layer"), ([1, 3], "all_heads")], ids=str
)
def test_every_layer_may_have_its_rank(
    ranks: list[int], scope: str, source: Path, tmp_path: Path
) -> None:
    """Layer by layer what one rank for all gives; back, grown, and grown then back."""
    convert(source, tmp_path / "both", rank=ranks, scope=scope, dtype="float64")
    assert read_json(tmp_path / "both" / "config.json")["shared_rank"] == ranks
    found = load_file(tmp_path / "both" / "model.safetensors")
    for layer, rank in enumerate(ranks):
        convert(source, tmp_path / "one", rank=rank, scope=scope, dtype="float64")
        one = load_file(tmp_path / "one" / "model.safetensors")
        names = [name for name in found if f".{layer}.self_attn" in name]
        assert len(names) > 6
        assert all(found[name].equal(one[name]) for name in names)

    quick = Settings(prompts=2, length=12)
    back = growkit.convert(tmp_path / "both", tmp_path / "back", "diff", verify=quick)
    assert back["promise"] == "exact"
    assert back["kept"]
    assert relative_error(tmp_path / "both", tmp_path / "back") < LIMIT
    grown = growkit.grow(tmp_path / "both", tmp_path / "wide", hidden="x2", verify=quick)
    assert grown["kept"]
    assert relative_error(tmp_path / "both", tmp_path / "wide") < LIMIT
    assert read_json(tmp_path / "wide" / "config.json")["shared_rank"] == ranks


BAD_RANKS: list[Any] = [[2], [2, 2, 2], [0, 2], [2, -1], [2, "3"], [2, 2.0], [True, 2], [], "2", 0]


@pytest.mark.parametrize("ranks", BAD_RANKS, ids=str)
def test_bad_ranks_in_a_config_are_refused(ranks: Any, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "shared", rank=[2, 2])
    config = read_json(tmp_path / "shared" / "config.json")
    config["shared_rank"] = ranks
    (tmp_path / "shared" / "config.json").write_text(json.dumps(config))
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError, match="needs shared_rank as a positive whole number, or a list"):
        growkit.convert(tmp_path / "shared", tmp_path / "out", "diff")
    assert folder_bytes(tmp_path) == before
    with pytest.raises(ValueError, match=r"shared_rank is .* a list with one for each layer"):
        DiffTransformerConfig(num_hidden_layers=2, qk_projection="shared", shared_rank=ranks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", listed("ranks", "made again"), ids=str)
def test_a_manifest_makes_the_same_model_again(
    options: dict[str, Any], source: Path, text: str, tmp_path: Path
) -> None:
    """A recipe in YAML; what it settles stands in the manifest, and is a recipe once more."""
    nearly_equal(source, 2)
    step = {"convert": "shared-diff"} | options
    step |= {"calibration": text} if "calibration" in options else {}
    recipe = {"source": str(source), "steps": [step], "output": str(tmp_path / "first")}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe | {"verify": {"prompts": 1, "length": 12}}))
    assert cli("run", file, "--json").exit_code == 0

    manifest = read_json(tmp_path / "first" / "growkit.json")["recipe"]
    (settled,) = manifest["steps"]
    config = read_json(tmp_path / "first" / "config.json")
    ranks = config["shared_rank"]
    assert settled["rank"] == ",".join(map(str, ranks if isinstance(ranks, list) else [ranks]))
    assert not settled.keys() & {"tolerance", "energy"}
    assert manifest["source"] == source.name  # no path of the machine: they are put back
    steps = [settled | ({"calibration": text} if "calibration" in options else {})]
    file.write_text(yaml.safe_dump(manifest | {"source": str(source), "steps": steps}))
    again = cli("run", file, "--output", tmp_path / "second")
    assert again.exit_code == 0, again.output
    tensors = [load_file(tmp_path / each / "model.safetensors") for each in ("first", "second")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[1][name].equal(tensor) for name, tensor in tensors[0].items())


@pytest.fixture
def two_texts(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    documents = (training_text()[start : start + 150] for start in (20_000, 40_000))
    file.write_text(DOCUMENT_SEPARATOR.join(documents))
    return str(file)


def shared(source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    growkit.convert(source, target, "shared-diff", overwrite=True, verify=False, **options)
    return load_file(target / "model.safetensors")


def settled(target: Path) -> dict[str, Any]:
    (step,) = read_json(target / "growkit.json")["recipe"]["steps"]
    return step


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scope", "rank"), [("head", 1), ("head", 4), ("layer", 3)])
def test_what_costs_least_is_taken(scope: str, rank: int, two_texts: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scope": scope, "rank": rank, "dtype": "float32"}
    options["calibration"] = two_texts
    tokens = make_prompts(Settings(two_texts), MODEL, read_json(MODEL / "config.json")).windows
    expected, costs = probabilities(MODEL, tokens), {}
    for shrinkage in SHRINKAGES:
        shared(MODEL, tmp_path / "each", shrinkage=shrinkage, **options)
        assert float(settled(tmp_path / "each")["shrinkage"]) == shrinkage
        costs[shrinkage] = divergence(expected, probabilities(tmp_path / "each", tokens))
    once = shared(MODEL, tmp_path / "out", **options)
    found = float(settled(tmp_path / "out")["shrinkage"])
    assert costs[found] <= min(costs.values()) * (1 + 1e-5)
    assert max(costs.values()) > 1.01 * min(costs.values())  # the control: it matters
    again = shared(MODEL, tmp_path / "again", shrinkage=found, **options)
    assert all(once[name].equal(again[name]) for name in once)
