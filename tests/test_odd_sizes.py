"""Spaces that grow by other than whole copies: uneven, padded, placed by hand.

What grows how is said in expansions; transformers judges the written folder in strict float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

import growkit
from growkit.algebra.expansion import (
    NOTHING,
    Expansion,
    following,
    in_blocks,
    padded,
    placed,
    side_by_side,
    uneven,
)
from growkit.algebra.splits import Shares
from growkit.base.errors import InputError
from growkit.base.tensors import Config, Weights
from growkit.families.family import Family, stored_family
from growkit.growth.copying import DEFAULT_SNR_DB, SNR_DB, SYMMETRY, expand
from growkit.planning.operation import Change
from growkit.recipe import recipe as recipes
from tests.conftest import edit_json, relative_error, save_random, seeded

Make = Callable[..., Path]
QUICK = growkit.Settings(prompts=1, length=16)


class ByHand:
    """A growth method whose expansions are given."""

    name, paper, options = "by-hand", "-", (SYMMETRY, SNR_DB)

    def __init__(self, **expansions: Expansion) -> None:
        self.expansions = expansions

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """DiffLlama has one eps for norms over hidden states and heads."""
        return family.name != "DiffLlama" or "hidden" not in self.expansions

    def portable(self, family: Family, config: Config, options: Any) -> Mapping[str, str]:
        return options

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        shares = Shares(DEFAULT_SNR_DB if options["symmetry"] == "break" else None, seed)
        grown = {axis: len(each.source) for axis, each in self.expansions.items()}
        plan = expand(source, stored_family(source), grown, lambda: self.expansions, shares)
        return Change([plan])


@pytest.fixture
def grow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``grow(source, out, ffn=uneven(24, 40, groups=False))``"""
    known = recipes.operations("grow")

    def by_hand(source: Path, out: Path, *, verify: Any = False, **expansions: Expansion) -> Any:
        symmetry = expansions.pop("symmetry", "break")
        several = known | {"by-hand": ByHand(**expansions)}
        monkeypatch.setattr(recipes, "operations", lambda verb: several)
        return growkit.grow(source, out, method="by-hand", symmetry=symmetry, verify=verify)

    return by_hand


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def any_expansion(size: int, chance: Random, *, hidden: bool = False) -> Expansion:
    kind = chance.choice(["copies", "padded"] if hidden else ["copies", "uneven", "padded", "hand"])
    if kind == "copies":
        return chance.choice([in_blocks, side_by_side])(size, chance.choice([1, 2, 3]))
    if kind == "padded":
        return padded(size, 4 * size if hidden else size + chance.randrange(9))
    if kind == "uneven":
        return uneven(size, size + chance.randrange(2 * size), groups=chance.random() < 0.5)
    source = [*range(size), *(chance.randrange(NOTHING, size) for _ in range(size))]
    share = [1.0] * size + [0.0] * size  # all or nothing: only the first copy is read
    order = chance.sample(range(2 * size), 2 * size)
    return placed(size, [source[i] for i in order], [share[i] for i in order])


@pytest.mark.parametrize("seed", range(24))
def test_any_expansions(seed: int, tmp_path: Path, grow: Callable[..., Any]) -> None:
    chance = seeded(seed)
    kv_heads, group = chance.choice([2, 3]), chance.choice([1, 2])
    heads = kv_heads * group
    class_of: type[PreTrainedConfig] = chance.choice([LlamaConfig, Qwen3Config])
    config = class_of(
        vocab_size=29,
        hidden_size=36,
        intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=6,
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=chance.random() < 0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16])
    source = save_random(tmp_path / "source", config, seed, dtype)
    serving = uneven(kv_heads, chance.choice([kv_heads, 4, 6]), groups=chance.random() < 0.5)
    places = chance.choice([n for n in (1, 2, 3, 4) if n >= group])
    places = next(n for n in range(places, 9) if 36 % (n * len(serving.source)) == 0 or n == 8)
    expansions = {
        "ffn": any_expansion(11, chance),
        "hidden": any_expansion(36, chance, hidden=class_of is LlamaConfig),
        "kv_heads": serving,
        "heads": following(serving, heads, places * len(serving.source)),
    }
    if class_of is Qwen3Config:  # its eps serves norms inside of heads as well
        expansions["hidden"] = in_blocks(36, chance.choice([1, 2, 3]))
    if class_of is LlamaConfig and len(expansions["hidden"].source) % len(
        expansions["heads"].source
    ):
        with pytest.raises(InputError, match="hidden_size"):
            grow(source, tmp_path / "out", **expansions)
        return
    symmetry = chance.choice(["keep", "break"])
    grow(source, tmp_path / "out", symmetry=symmetry, **expansions)
    assert relative_error(source, tmp_path / "out") < 1e-12


@DTYPES
@pytest.mark.parametrize("tied", [True, False])
def test_zeros(
    dtype: torch.dtype, tied: bool, make: Make, tmp_path: Path, grow: Callable[..., Any]
) -> None:
    """Zeros that make hidden four times as large: its norms take that back, and round nothing."""
    source = make("llama", dtype=dtype, tie_word_embeddings=tied, rms_norm_eps=0.03)
    out = tmp_path / "out"
    grow(source, out, hidden=padded(16, 64), ffn=padded(24, 25))
    assert relative_error(source, out) < 1e-12
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 0.03 / 4
    # Likewise as it will run, in the dtype of the files: no weight has been rounded.
    ids = torch.arange(12)[None]
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(ids).logits
        for folder in (source, out)
    )
    scale = one.double().square().mean().sqrt()
    assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * scale


def test_zeros_where_one_eps_serves_other_norms(
    make: Make, tmp_path: Path, grow: Callable[..., Any]
) -> None:
    """DiffLlama has one for all; as a DIFF Transformer, head norms keep theirs."""
    source = make("diffllama", rms_norm_eps=0.03)
    grow(source, tmp_path / "out", hidden=padded(16, 64))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[key] for key in ("rms_norm_eps", "head_norm_eps")] == [0.03 / 4, 0.03]
    assert relative_error(source, tmp_path / "out") < 1e-12


def make_qwen3(folder: Path) -> Path:
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
    return save_random(folder, Qwen3Config(**sizes, **heads))


def test_what_a_norm_cannot_be_told_is_refused(
    make: Make, tmp_path: Path, grow: Callable[..., Any]
) -> None:
    llama, qwen3 = make("llama"), make_qwen3(tmp_path / "qwen3")
    gpt2 = save_random(
        tmp_path / "gpt2",
        GPT2Config(
            vocab_size=29, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
        ),
    )
    refused: list[tuple[Path, dict[str, Expansion], str]] = [
        (llama, {"hidden": uneven(16, 28, groups=False)}, "uneven copies do not keep it"),
        (llama, {"hidden": padded(16, 32)}, "powers of four"),
        (qwen3, {"hidden": padded(16, 64)}, "rms_norm_eps serves norms over both"),
        (gpt2, {"hidden": padded(16, 64), "heads": padded(2, 8)}, "which zeros do not keep"),
        (gpt2, {"hidden": uneven(16, 24, groups=True), "heads": padded(2, 3)}, "uneven copies"),
    ]
    for source, expansions, why in refused:
        with pytest.raises(InputError, match=why):
            grow(source, tmp_path / "out", **expansions)
        assert not (tmp_path / "out").exists()


def test_without_what_the_norms_take_back_it_is_another_model(
    make: Make, tmp_path: Path, grow: Callable[..., Any]
) -> None:
    """The control of the tests above: eps as it was, and weights as they were."""
    source, out = make("llama", rms_norm_eps=0.03), tmp_path / "out"
    grow(source, out, hidden=padded(16, 64))
    with edit_json(out / "config.json") as config:
        config |= {"rms_norm_eps": 0.03}
    assert relative_error(source, out) > 1e-3


def test_heads_that_would_lose_what_serves_them_are_refused(
    make: Make, tmp_path: Path, grow: Callable[..., Any]
) -> None:
    source = make("llama")
    with pytest.raises(AssertionError, match="copies of heads are not next to what serves"):
        grow(source, tmp_path / "out", heads=in_blocks(4, 2), kv_heads=side_by_side(2, 4))
    with pytest.raises(AssertionError, match="copies of heads are not next to what serves"):
        grow(source, tmp_path / "out", kv_heads=in_blocks(2, 2))
    grow(source, tmp_path / "out", heads=in_blocks(4, 2), kv_heads=in_blocks(2, 2))
    assert relative_error(source, tmp_path / "out") < 1e-12
