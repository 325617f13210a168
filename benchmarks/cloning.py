"""What growing costs the logits, beside two other implementations of HyperCloning.

    python benchmarks/cloning.py [--hypercloning CHECKOUT] [--dynamic-sizing-lm CHECKOUT]

Small random models of every family that one of them names, twice as wide (hidden size, MLP and
heads). The figure is the largest difference of the logits of whole transformers models, relative to
their root mean square: in strict float64, and as people run them, in float32 and bfloat16. Another
implementation takes part if a checkout of it is given; where it cannot run with the transformers
that is installed, the table says why. Prints Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from measuring import head, machine, row
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.engine.strict import strict_float64

SIZES = {
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 48, "do_layer_norm_before": False},
    "gpt_neox": {},
    "olmo": {"tie_word_embeddings": False},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
    "olmo2": {},
    "phi": {"num_key_value_heads": 6},
}
"""Families that have been named, and what their configs say beside or instead of the sizes."""

FACTOR = {"gemma": 4, "gemma2": 4}
"""Twice as wide, where that can be had exactly."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = 48

SYMMETRY = ("break", "keep")
"""Random splits, which let copies diverge, or even ones, as the others make them."""

OURS = [f"growkit, {each}" for each in SYMMETRY]

Clone = Callable[[Any, int], Any]


def lively(kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Save a random model in which no norm is one and no bias zero."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | OWN[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.dim() > 1
            scale = 1.5 * parameter.shape[-1] ** -0.5 if wide else 0.3
            parameter.normal_(0.0 if wide else 0.7, scale)
    model.to(dtype).save_pretrained(folder)


def stored(name: str) -> torch.dtype:
    """In what the weights are that are computed with in a dtype."""
    return torch.float32 if name == "float64" else DTYPES[name]


def difference(before: Any, after: Any, name: str) -> float:
    """Of the logits of two models, relative to their root mean square."""
    ids = torch.randint(
        SIZES["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    with strict_float64() if name == "float64" else nullcontext(), torch.no_grad():
        expected, found = (
            each.eval().to(DTYPES[name])(ids).logits.double() for each in (before, after)
        )
    return float((expected - found).abs().max() / expected.square().mean().sqrt())


def loaded(folder: Path, name: str) -> Any:
    """A model in a dtype, with its buffers."""
    with strict_float64() if name == "float64" else nullcontext():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[name], attn_implementation="eager"
        )


def ours(kind: str, name: str, place: Path, symmetry: str) -> float:
    """The difference after growkit."""
    source, out = place / "source", place / symmetry
    growkit.grow(source, out, hidden=f"x{FACTOR.get(kind, 2)}", symmetry=symmetry, verify=False)
    return difference(loaded(source, name), loaded(out, name), name)


def theirs(clone: Clone, kind: str, name: str, place: Path) -> float:
    """The difference after another implementation, computed in the dtype of the weights."""
    dtype = stored(name)
    source = AutoModelForCausalLM.from_pretrained(
        place / "source", dtype=dtype, attn_implementation="eager"
    )
    with redirect_stdout(StringIO()):
        grown = clone(source, FACTOR.get(kind, 2)).to(dtype)
    return difference(source, grown, name)


def hypercloning(checkout: Path) -> Clone:
    """``cloneModel`` of apple/ml-hypercloning; its OLMo is a class of another package.

    It asks for numbers of heads and a name of a head that transformers no longer has. They are put
    back, so that there are figures at all.
    """
    from transformers.models.gemma.modeling_gemma import GemmaAttention
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention

    for attention in (LlamaAttention, GemmaAttention, Gemma2Attention, GPTNeoXAttention):
        attention.num_heads = property(lambda self: self.config.num_attention_heads)
        attention.num_attention_heads = attention.num_heads
        attention.num_key_value_heads = property(lambda self: self.config.num_key_value_heads)
    GPTNeoXForCausalLM.embed_out = property(lambda self: self.lm_head)
    other = types.ModuleType("hf_olmo.configuration_olmo")
    other.OLMoConfig = object  # type: ignore[attr-defined]
    sys.modules |= {"hf_olmo": types.ModuleType("hf_olmo"), "hf_olmo.configuration_olmo": other}
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("hypercloning")
    return lambda model, factor: module.cloneModel(
        model, embedding_dim_multiplier=factor, up_project_multiplier=factor
    )


def dynamic_sizing(checkout: Path) -> Clone:
    """The functions of mtasic85/dynamic-sizing-lm, by class."""
    sys.path.insert(0, str(checkout))
    functions = importlib.import_module("up").ARCHITECTURE_TO_CLONE_FUNCTION
    return lambda model, factor: functions[type(model).__name__](
        model, embedding_dim_multiplier=factor, up_project_multiplier=factor
    )


def cell(measure: Callable[[], float]) -> str:
    """A figure, or why there is none."""
    try:
        return f"{measure():.1e}"
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:90]}".replace("|", " ")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hypercloning", type=Path)
    parser.add_argument("--dynamic-sizing-lm", type=Path)
    arguments = parser.parse_args()
    others = {}
    if arguments.hypercloning:
        others["ml-hypercloning"] = hypercloning(arguments.hypercloning)
    if arguments.dynamic_sizing_lm:
        others["dynamic-sizing-lm"] = dynamic_sizing(arguments.dynamic_sizing_lm)
    print(f"{machine('transformers')}; relative difference of the logits")
    print(head("family", "wider by", "computed in", *OURS, *others))
    for kind in OWN:
        for name in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                lively(kind, stored(name), place / "source")
                cells = [cell(partial(ours, kind, name, place, each)) for each in SYMMETRY]
                cells += [
                    cell(partial(theirs, each, kind, name, place)) for each in others.values()
                ]
            print(row(kind, FACTOR.get(kind, 2), name, *cells), flush=True)


if __name__ == "__main__":
    main()
