"""Motif-3, judged by ``tests.motif3_reference``."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import load_model
from growkit.model.families.family import family_of
from growkit.sources import find
from tests import motif3_reference as reference
from tests.files import edit_json, edit_weights, listed, with_tokenizer
from tests.models import distance, seeded

QUICK = growkit.Settings(prompts=1, length=16)
IDS = torch.randint(29, (19,), generator=torch.Generator().manual_seed(0))

GROWTHS: dict[str, dict[str, str]] = listed("motif3", "growths")


def draw(choose: Random) -> dict[str, Any]:
    """A random config of the family."""
    kv, per_kv, ratio = choose.choice([1, 2]), choose.choice([1, 2]), choose.choice([1, 2, 4])
    top_k = choose.choice([1, 2])
    return reference.TINY | {
        "hidden_size": choose.choice([4, 8, 12]),
        "num_key_value_heads": kv,
        "num_noise_heads": kv * per_kv,
        "num_attention_heads": kv * per_kv * (ratio + 1),
        "head_dim": choose.choice([6, 8, 12]),
        "v_head_dim": choose.choice([3, 6]),
        "mhc_expansion_rate": choose.choice([1, 2, 4]),
        "n_dense_first_layers": choose.choice([0, 1, 3]),
        "experts_top_k": top_k,
        "route_norm": choose.choice([True, False]),
        "hidden_clamp": choose.choice([0.5, 1e6]),
        "sliding_window_period": choose.choice([2, 4]),
    }


def random_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A folder with a random model of a config."""
    family = family_of(config, "here")
    sizes = family.sizes(config)
    shapes = {name: of.shape(sizes) for name, of in family.patterns(config).items()}
    return reference.write_folder(folder, config, shapes, seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(200))
def test_its_class_computes_the_same(seed: int, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", draw(seeded(seed)), seed)
    expected = reference.logits(source, IDS)
    for attention in ("eager", "sdpa"):
        with strict_float64(), torch.no_grad():
            model = load_model(source, torch.float64, torch.device("cpu"), attention)
            assert distance(expected, model(IDS[None]).logits[0]) < 1e-12


def test_every_tensor_matters(tmp_path: Path) -> None:
    """The control: the judge notices a wrong number in any kind of tensor."""
    state, config = reference.read(random_model(tmp_path / "source", reference.TINY))
    expected = reference.decode(state, config, IDS[:8])
    kinds = [name for name in state if not re.search(r"layers\.([03]|1\.moe|2\.[^m]|2\.mhc)", name)]
    for name in kinds:
        wrong = state[name].clone()
        wrong.view(-1)[0] -= 2
        other = reference.decode(state | {name: wrong}, config, IDS[:8])
        assert distance(expected, other) > 1e-9, name
    assert len(kinds) > 45


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("growth", GROWTHS)
def test_growth_changes_nothing(growth: str, seed: int, tmp_path: Path) -> None:
    choose, out = seeded(seed), tmp_path / "out"
    config = draw(choose)
    source = random_model(tmp_path / "source", config, seed)
    options = {key: str(config.get(value, value)) for key, value in GROWTHS[growth].items()}
    grown = growkit.grow(source, out, verify=QUICK, seed=seed, **options)
    assert grown["kept"], grown["verification"]["reason"]
    assert grown["promise"] == "exact"
    assert distance(reference.logits(source, IDS), reference.logits(out, IDS)) < 1e-12
    written = json.loads((out / "config.json").read_text())
    assert written.keys() == reference.TINY.keys()
    with edit_weights(out) as weights:
        count = written["num_hidden_layers"]
        parts = [f"model.layers.{layer}.self_attn." for layer in range(count)]
        part = choose.choice([part for part in parts if weights[f"{part}wo.weight"].any()])
        of_layer = [name for name in sorted(weights) if name.startswith(part)]
        weights[choose.choice(of_layer)].mul_(1.5).add_(0.25)
    assert distance(reference.logits(source, IDS), reference.logits(out, IDS)) > 1e-9
    assert not growkit.verify(source, out, QUICK)["kept"]


def test_new_layers_are_left_out_again(tmp_path: Path) -> None:
    """With a text: its tokenizer loads, though transformers does not know its ``model_type``."""
    config = reference.TINY | {"vocab_size": 260}
    source = with_tokenizer(random_model(tmp_path / "source", config))
    deeper, out, text = (tmp_path / name for name in ("deeper", "out", "text"))
    text.write_text("what a text says, a proof can read")
    growkit.grow(source, deeper, method="depth", layers="6", verify=False)
    (deeper / "growkit.json").unlink()
    settings = growkit.Settings(prompts=1, length=16, text=str(text))
    result = growkit.shrink(deeper, out, method="unused", verify=settings)
    assert (result["kept"], result["promise"]) == (True, "exact")
    assert distance(reference.logits(source, IDS), reference.logits(out, IDS)) < 1e-12
    written = json.loads((out / "config.json").read_text())
    assert written["num_hidden_layers"] == config["num_hidden_layers"]


def test_a_model_type_may_be_that_of_two_families(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", reference.TINY)
    shown = growkit.inspect(source)
    assert (shown.family, shown.attention.ratio) == ("Motif-3", 4)
    with edit_json(source / "config.json") as config:
        del config["attention_cls"]
    with pytest.raises(InputError, match=r"q_proj.*a Motif model"):
        growkit.inspect(source)


@pytest.mark.parametrize(("more", "options", "reason"), listed("motif3", "refused"))
def test_what_its_class_cannot_compute_is_refused_in_the_plan(
    more: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = random_model(tmp_path / "source", reference.TINY)
    with edit_json(source / "config.json") as config:
        config |= more
    with pytest.raises(InputError, match=reason):
        growkit.grow(source, tmp_path / "out", dry_run=True, **options)


def test_it_has_no_place_in_the_class_of_earlier_models(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", reference.TINY)
    assert find(source).open().family.form is None
    with pytest.raises(InputError, match="no DIFF Transformer"):
        growkit.convert(source, tmp_path / "out", "dint", dry_run=True)
