"""Tiny random models, made by transformers, and the oracle that judges what becomes of them."""

import os
import random
from collections.abc import Callable
from dataclasses import fields
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import growkit
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_internals import uninitialised
from tests.files import listed

logging.disable_progress_bar()
logging.set_verbosity(CRITICAL)  # which proofs need not set and reset
torch.set_num_threads(1)  # tiny models: a second thread only costs
os.fsync = lambda descriptor: None  # nor does any machine lose power

growkit.register_own_classes()


Make = Callable[..., Path]
"""Of the fixture ``make``."""
KINDS = ("llama", "mistral", "diffllama", "diff_transformer")
TOKENS = 12
SIZES: dict[str, Any] = listed("families", "sizes of tiny models")
"""Of tiny models; a type takes those that its config knows."""


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-13) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are the same."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat, others = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return bool(flat.equal(others))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter a random value: no bias is zero and no norm is one, so faults show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def save_model(
    folder: Path,
    kind: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Save a tiny random model of a type and return its folder."""
    config_class = CONFIG_MAPPING[kind]
    known = {each.name: each.default for each in fields(config_class)}
    sizes = {k: v for k, v in SIZES.items() if k in known or k in config_class.attribute_map}
    if known.get("head_dim"):  # else it follows from the hidden size
        sizes["head_dim"] = 4
    return save_random(folder, config_class(**(sizes | config)), seed, dtype, shard_size)


def save_random(
    folder: Path,
    config: PreTrainedConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
) -> Path:
    """Save a random model of a config and return its folder."""
    torch.manual_seed(seed)
    with uninitialised():
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load_strict(folder: Path) -> PreTrainedModel:
    """The folder's model in strict float64, all of its weights from the files."""
    with strict_float64():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the fast one has no float64
            output_loading_info=True,
        )
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    return model.eval()


def random_ids(model: PreTrainedModel, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """A prompt of a model's tokens, [1, tokens]."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    return torch.randint(count, (1, tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one prompt, [tokens, vocabulary], in strict float64."""
    with strict_float64(), torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def strict_logits(folder: Path, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """Logits of seeded random tokens, in strict float64."""
    model = load_strict(folder)
    return logits_of(model, random_ids(model, seed, tokens))


def distance(
    expected: torch.Tensor, found: torch.Tensor, mask: torch.Tensor | None = None
) -> float:
    """Largest difference against the root mean square of what is expected, at real tokens."""
    if mask is not None:
        expected, found = expected[mask.bool()], found[mask.bool()]
    return float((expected - found).abs().max() / expected.square().mean().sqrt())


def relative_error(source: Path, target: Path) -> float:
    """How far the logits of the source's tokens are apart."""
    before, after = load_strict(source), load_strict(target)
    ids = random_ids(before)
    expected = logits_of(before, ids)
    return distance(expected, logits_of(after, ids)[:, : expected.shape[1]])


def train_step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    """One step on these tokens in strict float64; gives the loss before it."""
    with strict_float64():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def seeded(seed: int) -> random.Random:
    """Random choices that do not change from run to run."""
    return random.Random(seed)
