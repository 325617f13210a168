"""A mutation study of the proof: every fault is caught, and no sound pair raises an alarm."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import ConvertStep, GrowStep, Recipe, Step
from growkit.results.proof_result import VerifyResult
from tests.families import DTYPES, diffllama, llama
from tests.files import edit_config, edit_json
from tests.models import save_model, seeded
from tests.test_group_diff import draw_factors, draw_source, legal


def draw_pair(choose: Random) -> tuple[str, dict[str, Any], tuple[Step, ...]]:
    """A random model, and random steps that promise to be exact."""
    symmetry = choose.choice(["break", "keep"])
    way = choose.choice(["llama", "mistral", "diffllama", "group-diff", "softmax", "diff"])
    if way == "diffllama":
        config, sizes = diffllama(choose)
        return "diffllama", config, (GrowStep("hypercloning", sizes, symmetry=symmetry),)
    if way == "group-diff":
        kind, config, counts = draw_source(choose)
        factors = draw_factors(choose)
        while not legal(counts, factors):
            factors = draw_factors(choose)
        sizes = {name: f"x{factor}" for name, factor in factors.items()}
        return kind, config, (GrowStep("group-diff", sizes, symmetry=symmetry),)
    if way == "diff":
        return draw_conversion(choose, symmetry)
    config, sizes = llama(choose)
    if way == "softmax":
        return "llama", config, (ConvertStep(choose.choice(["diff", "diff-v2"])),)
    if way == "mistral":
        del config["attention_bias"], config["mlp_bias"]
        config["sliding_window"] = choose.choice([None, 5])
    return way, config, (GrowStep("hypercloning", sizes, symmetry=symmetry),)


def draw_conversion(choose: Random, symmetry: str) -> tuple[str, dict[str, Any], tuple[Step, ...]]:
    """A random differential model, and a conversion that is exact, alone or after a growth."""
    kind, config, _ = draw_source(choose)
    wider = (GrowStep("group-diff", {"hidden": "x2"}, symmetry=symmetry),) * choose.choice([0, 1])
    if kind == "diffllama":
        return kind, config, (*wider, ConvertStep("diff-transformer"))
    config |= {"integral": "none", "qk_projection": "full"}
    grouped = config["num_attention_heads"] > 2 * config["num_noise_heads"]
    if grouped and choose.random() < 0.5:
        return kind, config, (*wider, ConvertStep("diff"))
    integral = choose.choice(["causal", "column_mean"])
    return kind, config, (*wider, ConvertStep("dint", {"integral": integral}))


def check_sound(seed: int, folder: Path) -> None:
    """Draw a pair, write it into a folder, and hold the proof to keeping it."""
    choose = seeded(seed)
    kind, config, steps = draw_pair(choose)
    config["num_hidden_layers"] = 2
    if "lambda_init" in config:
        config["lambda_init"] = [choose.uniform(0.1, 0.9) for _ in range(2)]
    source = save_model(folder / "source", kind, seed, choose.choice(DTYPES), **config)
    target = str(folder / "target")
    wider = choose.choice([None, None, None, "float64"])
    growkit.run(Recipe(str(source), steps, target, verify=None, seed=seed, dtype=wider))
    asked: dict[str, Any] = {"prompts": choose.choice([1, 2]), "length": choose.randint(12, 16)}
    result = growkit.verify(source, target, seed=seed, **asked)
    assert result["promise"] == "exact"
    assert result["kept"], result["reason"]
    assert result.sections.weights.recovered


QUICK: dict[str, Any] = {"prompts": 1, "length": 12}
VOCABULARY = 29
HEAD = 4
"""``head_dim`` of all models here."""


@dataclass(frozen=True)
class Pair:
    """A source of three layers, and the steps that make its target."""

    kind: str
    steps: tuple[Step, ...] = (GrowStep("hypercloning", {"hidden": "x2"}),)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_size: str = "5GB"

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Make ``source`` and ``target`` in a folder."""
        config = {"num_hidden_layers": 3, "vocab_size": VOCABULARY} | self.config
        source = save_model(folder / "source", self.kind, seed, self.dtype, **config)
        target = str(folder / "target")
        recipe = Recipe(str(source), self.steps, target, None, seed, shard_size=self.shard_size)
        growkit.run(recipe)
        return folder


FOUR_TO_ONE = (GrowStep("group-diff", {"hidden": "x2", "signal_heads": "x4"}),)
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DIFF_HEADS = {"num_key_value_heads": 4}
V2 = {"lambda_type": "projected", "noise_keys": "shared", "head_norm": "none"}
V2 |= {"num_key_value_heads": 2}
SHARED = {"qk_projection": "shared", "shared_rank": 2}


PAIRS = {
    "llama": Pair("llama", config={"attention_bias": True}),
    "tied": Pair("llama", config={"tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE}),
    "sharded": Pair("llama", shard_size="16KB"),
    "mistral": Pair("mistral", config={"sliding_window": 4}),
    "diffllama": Pair("diffllama", config=DIFF_HEADS),
    "group-diff": Pair("diff_transformer", FOUR_TO_ONE, DIFF_HEADS, torch.bfloat16),
    "dint": Pair("diff_transformer", FOUR_TO_ONE, DIFF_HEADS | {"integral": "causal"}),
    "gated-dint": Pair("diff_transformer", (ConvertStep("dint"),), DIFF_HEADS),
    "shared": Pair("diff_transformer", FOUR_TO_ONE, DIFF_HEADS | SHARED),
    "v2": Pair("diff_transformer", FOUR_TO_ONE, V2),
    "softmax-v2": Pair("llama", (ConvertStep("diff-v2"),)),
    "multiplied-out": Pair(
        "diff_transformer", (ConvertStep("diff"),), DIFF_HEADS | SHARED, torch.float64
    ),
    "rounded": Pair("diff_transformer", (ConvertStep("diff"),), DIFF_HEADS | SHARED),
    "different": Pair("diff_transformer", (ConvertStep("dint", {"gamma": "unified"}),), DIFF_HEADS),
    "bounded": Pair("diff_transformer", (ConvertStep("shared-diff", {"rank": 1}),), DIFF_HEADS),
    "bounded-grown": Pair(
        "diff_transformer",
        (ConvertStep("shared-diff", {"rank": 1}), GrowStep("group-diff", {"hidden": "x2"})),
        DIFF_HEADS,
    ),
}
WIDER = {"gated-dint", "different"}
"""Targets whose head norms are in float64, which transformers does not load."""
VECTORS = ("diffllama", "group-diff", "dint")
FULL = ("llama", "diffllama", "group-diff", "v2")
ALL = (*FULL, "shared")


@dataclass(frozen=True)
class Fault:
    """What is spoiled, and where.

    Attributes:
        name: what is spoiled, in words.
        spoil: spoils the files in a folder.
        pairs: the targets that it is tried on.
        layer: index of the layer at fault, the first if there are several; None outside of layers.
        component: the part of the model that is at fault.
        at: what the verdict must name: a tensor, ``KEY in config.json``, or a file.
        shows: whether logits tell: one changes on these prompts, and the promise says it must not.
        refused: whether the target cannot be compared at all.
    """

    name: str
    spoil: Callable[[Path], Any]
    pairs: tuple[str, ...]
    layer: int | None
    component: str
    at: str
    shows: bool = True
    refused: bool = False

    @property
    def module(self) -> str | None:
        """The first module whose output differs."""
        if not self.shows:
            return None
        if self.layer is not None:
            return f"model.layers.{self.layer}"
        # The final norm is in no block of its own.
        outside = {"embedding": "model.embed_tokens", "norm": "lm_head", "lm_head": "lm_head"}
        return outside.get(self.component)


FAULTS: list[Fault] = []


class Tensors(dict[str, Tensor]):
    """The tensors of a folder, and its numbers of signal heads (of all heads) and noise heads."""

    signal = noise = 0

    def exchange(self, one: str, other: str) -> None:
        self[one], self[other] = self[other], self[one]


@contextmanager
def weights(folder: Path) -> Iterator[Tensors]:
    """The tensors of a folder, to be changed in place."""
    checkpoint, file = Checkpoint(folder), folder / "model.safetensors"
    sizes = checkpoint.family.sizes(checkpoint.config)
    tensors = Tensors(load_file(file))
    tensors.signal = sizes.get("signal_heads", sizes.get("heads", 0))
    tensors.noise = sizes.get("noise_heads", 0)
    yield tensors
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, file, {"format": "pt"})


def swap(tensor: Tensor, width: int, first: int, second: int, dimension: int = 0) -> None:
    """Exchange two blocks of ``width`` rows, or of columns."""
    blocks = tensor.unflatten(dimension, (-1, width))
    taken = blocks.index_select(dimension, torch.tensor([second, first]))
    assert not taken.equal(taken.flip(dimension))
    blocks.index_copy_(dimension, torch.tensor([first, second]), taken)


def swap_halves(tensors: Tensors, *names: str) -> None:
    for name in names:
        swap(tensors[name], len(tensors[name]) // 2, 0, 1)


def nudge(tensor: Tensor) -> None:
    """Make a tensor a thousandth larger, or more where its dtype holds nothing so close."""
    tensor *= 1 + max(1e-3, torch.finfo(tensor.dtype).eps)


def interleave(tensors: Tensors, *names: str) -> None:
    """Rows in the order of GPT-J and Meta's Llama files, where the pairs that turn are adjacent."""
    for name in names:
        halves = tensors[name].unflatten(0, (-1, 2, HEAD // 2))
        tensors[name] = halves.transpose(1, 2).flatten(0, 2)


def last_bit(matrix: Tensor, row: int, column: int) -> None:
    """Add the smallest there is to one element."""
    matrix[row, column] = matrix[row, column].nextafter(matrix.new_tensor(math.inf))


def change_unseen(embedding: Tensor) -> None:
    """Change an element of a row that no prompt touches."""
    asked = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    embedding[min(set(range(VOCABULARY)) - set(asked.flatten().tolist())), 7] *= 1 + 2**-7


def swap_kv_heads(tensors: Tensors) -> None:
    heads = tensors[V].shape[0] // HEAD
    heads = heads if heads * HEAD == tensors[K].shape[0] else heads // 2
    for name in (K, V):
        swap(tensors[name], tensors[name].shape[0] // heads, 0, heads - 1)


def swap_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(LAYER)]:
        tensors.exchange(name, name.replace(".1.", ".2."))


def permute_neurons(tensors: Tensors) -> None:
    for name, dimension in ((GATE, 0), (UP, 0), (DOWN, 1)):
        swap(tensors[name], 1, 0, 5, dimension)


def copy_vectors(tensors: Tensors) -> None:
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        tensors[ATTENTION + name] = tensors[f"model.layers.2.self_attn.{name}"]


EMBEDDING, HEAD_WEIGHT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER, THIRD = "model.layers.1.", "model.layers.2."
ATTENTION = LAYER + "self_attn."
INPUT_NORM = LAYER + "input_layernorm.weight"
Q, K, V, OUT = (f"{ATTENTION}{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
Q_BIAS, Q_BASE, Q_UP = (
    f"{ATTENTION}q_proj.{part}" for part in ("bias", "base.weight", "up.weight")
)
LAMBDA_Q1, LAMBDA_K1 = ATTENTION + "lambda_q1", ATTENTION + "lambda_k1"
LAMBDA_PROJECTION = ATTENTION + "lambda_proj.weight"
HEAD_NORM, GAMMA = ATTENTION + "head_norm.weight", ATTENTION + "gamma_gate"
SQRT2 = math.sqrt(2)
FOUR, FIVE = " ".join(FULL), " ".join(ALL)


def add(
    name: str, pairs: str, layer: int | None, component: str, at: str, spoil: Any, **more: bool
) -> None:
    """Add a fault to the study; ``pairs`` are separated by spaces."""
    FAULTS.append(Fault(name, spoil, tuple(pairs.split()), layer, component, at, **more))


def weight(
    name: str, pairs: str, layer: int | None, component: str, at: str, **more: bool
) -> Callable[[Callable[[Tensors], Any]], None]:
    """Add a fault in the weights: an edit of the tensors, given to what this returns."""

    def register(edit: Callable[[Tensors], Any]) -> None:
        def spoil(folder: Path) -> None:
            with weights(folder) as tensors:
                edit(tensors)

        add(name, pairs, layer, component, at, spoil, **more)

    return register


def in_json(name: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        with edit_json(folder / name) as content:
            before = json.dumps(content)
            edit(content)
            assert json.dumps(content) != before

    return spoil


def config(pairs: str, layer: int | None, **keys: Any) -> None:
    """Add a fault in ``config.json``, which logits show if a layer is given."""
    key, spoil = next(iter(keys)), in_json("config.json", methodcaller("update", keys))
    name, at = f"{key} {len(FAULTS)}", f"{key} in config.json"
    add(name, pairs, layer, "config", at, spoil, shows=layer is not None)


def shift_lambda_init(config: dict[str, Any]) -> None:
    first, second, _ = config["lambda_init"]
    config["lambda_init"] = [first, first, second]


def insert_a_layer(folder: Path) -> None:
    with weights(folder) as tensors:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            tensors[name.replace(".2.", ".3.")] = tensors[name]
            tensors[name] = tensors[name.replace(".2.", ".1.")]
    edit_config(folder, num_hidden_layers=4)


def take_a_shard_of_another_source(folder: Path) -> None:
    other = PAIRS["sharded"].make(folder.parent / "other", seed=1) / "target"
    last = max(folder.glob("model-*.safetensors"))
    shutil.copy(other / last.name, last)


# A target's first and last heads are copies of different heads, so exchanging them is no symmetry.
# Faults that logits do not show are too small for them, keep the function, or spoil a model whose
# function is another one.
# Heads
weight("two query heads", FOUR, 1, "q_proj", Q)(lambda t: swap(t[Q], HEAD, 0, t.signal - 1))
weight("a signal and a noise head", "diffllama dint v2", 1, "q_proj", Q)(
    lambda t: swap(t[Q], HEAD, 0, t.signal)
)
weight("two kv heads", "llama v2", 1, "k_proj", K)(swap_kv_heads)
weight("noise keys", "group-diff", 1, "k_proj", K)(lambda t: swap_halves(t, K))
weight("RoPE order of q", "llama diffllama", 1, "q_proj", Q)(lambda t: interleave(t, Q))
weight("value rows", FOUR, 1, "v_proj", V)(lambda t: t[V][:HEAD].copy_(t[V][:HEAD].flip(0)))
weight("output columns of heads", FOUR, 1, "o_proj", OUT)(
    lambda t: swap(t[OUT], t[OUT].shape[1] // t.signal, 0, t.signal - 1, dimension=1)
)
# Shares of splits, and scales
weight("a share", FIVE, 1, "mlp", GATE)(lambda t: nudge(t[GATE][:, : t[GATE].shape[1] // 2]))
weight("norm up", FIVE, 1, "input_layernorm", INPUT_NORM)(lambda t: t[INPUT_NORM].mul_(SQRT2))
# A tied head reads every copy, so their norm weights must be shares.
weight("unsplit norm", "tied", None, "norm", NORM)(lambda t: t[NORM].mul_(2))
weight("a head and a tie", "tied", None, "lm_head", HEAD_WEIGHT)(
    lambda t: t.update({HEAD_WEIGHT: t[EMBEDDING] * 1.01})
)
weight("scaled embedding", "llama tied group-diff", None, "embedding", EMBEDDING)(
    lambda t: t[EMBEDDING].mul_(SQRT2)
)
# Single elements and rows
weight("the last bit", "llama group-diff", 1, "mlp", UP)(lambda t: last_bit(t[UP], 3, 5))
weight("the last bit of a product", "multiplied-out", 1, "q_proj", Q, shows=False)(
    lambda t: last_bit(t[Q], 3, 5)
)
weight("a row of no prompt", "llama group-diff", None, "embedding", EMBEDDING, shows=False)(
    lambda t: change_unseen(t[EMBEDDING])
)
weight("NaN", "llama group-diff", 1, "mlp", UP, refused=True)(lambda t: t[UP][0, 0].fill_(math.nan))
weight("a missing tensor", "llama v2", 1, "o_proj", OUT, refused=True)(lambda t: t.pop(OUT))
# Whole layers, and the MLP
weight("two layers", FIVE, 1, "input_layernorm", INPUT_NORM)(swap_layers)
weight("gate and up", "llama diffllama v2", 1, "mlp", GATE)(lambda t: t.exchange(GATE, UP))
weight("two neurons in all", "tied group-diff", 1, "mlp", GATE, shows=False)(permute_neurons)
# Conversions
weight("a noise query", "softmax-v2", 1, "q_proj", Q)(lambda t: nudge(t[Q][-1]))
weight("a projection of λ", "softmax-v2", 1, "attention", LAMBDA_PROJECTION)(
    lambda t: t[LAMBDA_PROJECTION][1, 2].fill_(0.001)
)
weight("a row of a base", "bounded bounded-grown", 1, "q_proj", Q_BASE, shows=False)(
    lambda t: t[Q_BASE][3].zero_()
)
# One rounding is what the logits may show, and the promise has no bound for it.
weight("a row, rounded", "rounded", 1, "q_proj", Q, shows=False)(lambda t: t[Q][3].zero_())
# λ, the integral, the head norm, shared bases
weight("vectors of a layer", " ".join(VECTORS), 1, "attention", LAMBDA_Q1)(copy_vectors)
weight("two vectors", "diffllama", 1, "attention", LAMBDA_Q1, shows=False)(
    lambda t: t.exchange(LAMBDA_Q1, LAMBDA_K1)
)
weight("λ of a head", "v2", 1, "attention", LAMBDA_PROJECTION)(
    lambda t: t[LAMBDA_PROJECTION][0].zero_()
)
weight("scaled head norm", "group-diff gated-dint", 1, "head_norm", HEAD_NORM)(
    lambda t: t[HEAD_NORM].mul_(1.01)
)
weight("an open gate", "gated-dint", 1, "attention", GAMMA)(lambda t: t[GAMMA].add_(0.5))
weight("two bases", "shared", 1, "q_proj", Q_BASE)(lambda t: swap(t[Q_BASE], HEAD, 0, 1))

# The config
config("llama", None, tie_word_embeddings=True)
config("group-diff shared", 0, head_output_scale="none")
config("dint", 0, integral="none")
config(FIVE, 0, rms_norm_eps=3e-06)
config("llama group-diff", 0, rope_parameters={"rope_type": "default", "rope_theta": 10001.0})
config("tied", 0, head_dim=2 * HEAD, num_attention_heads=4, num_key_value_heads=2)
config("mistral", 0, sliding_window=8)
add(
    *("lambda_init", "group-diff dint shared", 1, "config", "lambda_init in config.json"),
    in_json("config.json", shift_lambda_init),
)
config_untied = in_json("config.json", methodcaller("update", tie_word_embeddings=False))
add("no tie", "tied", None, "lm_head", HEAD_WEIGHT, config_untied, refused=True)

# Other files
add(
    "a layer twice", "llama", 2, "input_layernorm", f"{THIRD}input_layernorm.weight", insert_a_layer
)
STALE = f"{THIRD}mlp.down_proj.weight"
add("a stale shard", "sharded", 2, "shard", STALE, take_a_shard_of_another_source)
add(
    *("no shard", "sharded", None, "shard", "lists, is missing"),
    lambda folder: max(folder.glob("model-*.safetensors")).unlink(),
    refused=True,
)


# The study


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``pairs("llama")`` -> the folder with that pair, made when it is first asked for."""
    made: dict[str, Path] = {}

    def pair(name: str) -> Path:
        if name not in made:
            made[name] = PAIRS[name].make(tmp_path_factory.mktemp(name))
        return made[name]

    return pair


@pytest.fixture
def spoiled(pairs: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """``spoiled(fault, "llama")`` -> a source, and a copy of its target with the fault."""

    def spoil(fault: Fault, pair: str) -> tuple[Path, Path]:
        target = shutil.copytree(pairs(pair) / "target", tmp_path / "target")
        fault.spoil(target)
        return pairs(pair) / "source", target

    return spoil


def proved(source: Path, target: Path) -> VerifyResult:
    return growkit.verify(source, target, **QUICK)


def cases(manifest: bool) -> list[Any]:
    """Every fault on each of its targets; without a manifest, those that logits show."""
    return [
        pytest.param(each, pair, manifest, id=f"{each.name}-{each.component}-{pair}-{manifest}")
        for each in FAULTS
        if manifest or each.shows or each.refused
        for pair in each.pairs
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pair", PAIRS)
def test_without_a_fault(pair: str, pairs: Callable[[str], Path], tmp_path: Path) -> None:
    target = shutil.copytree(pairs(pair) / "target", tmp_path / "target")
    result = proved(pairs(pair) / "source", target)
    assert result["kept"], result["reason"]
    assert result.sections.weights.recovered


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("fault", "pair", "manifest"), cases(True) + cases(False))
def test_a_fault_is_found(
    fault: Fault, pair: str, manifest: bool, spoiled: Callable[..., tuple[Path, Path]]
) -> None:
    """With a manifest, and by the logits alone."""
    source, target = spoiled(fault, pair)
    if not manifest:
        (target / MANIFEST).unlink()
    if fault.refused:
        with pytest.raises(InputError, match=re.escape(fault.at)):
            proved(source, target)
        return
    result = proved(source, target)
    assert not result["kept"]
    check_place(fault, result)
    if manifest:
        assert fault.at in result["reason"]
        tensor = fault.at if fault.at.startswith(("model.", "lm_head.")) else None
        assert result.sections.weights.first_lost_tensor == tensor
    else:
        assert result.sections.weights.recovered is None


def check_place(fault: Fault, result: VerifyResult) -> None:
    """The verdict names the first layer and the first module whose output differs."""
    if fault.name == "a layer twice" and result.sections.weights.recovered is None:
        assert (
            result.sections.logits.first_differing_layer is None
        )  # which layers correspond is not known
        return
    assert result.sections.logits.first_differing_layer == (fault.layer if fault.shows else None)
    assert result.sections.logits.first_difference == fault.module
    if fault.shows and fault.component not in ("shard", "config"):
        assert result["fault"] is not None
        if result.sections.weights.recovered is not None:
            assert result["fault"]["component"] == fault.component
    if fault.module:
        assert f"first difference is in {fault.module}" in result["reason"]


# False alarms


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", sorted(PAIRS.keys() - WIDER))
def test_saved_again(pair: str, pairs: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers loads a target and saves it, in other shards: the same model."""
    target = shutil.copytree(pairs(pair) / "target", tmp_path / "target")
    for file in target.glob("model*"):
        file.unlink()
    model = AutoModelForCausalLM.from_pretrained(pairs(pair) / "target", dtype="auto")
    model.save_pretrained(target, max_shard_size="20KB")
    result = proved(pairs(pair) / "source", target)
    assert result["kept"], result["reason"]
    assert result.sections.weights.recovered


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [*range(200), 979])  # on 979 another prompt rounds worst
def test_sound_pairs(seed: int, tmp_path: Path) -> None:
    check_sound(seed, tmp_path)
