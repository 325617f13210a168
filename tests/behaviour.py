"""In what two folders behave differently, seen with transformers alone.

Logits in float64 of prompts of all tokens, up to the longest context; token ids; what is resolved
of tokens and generation; greedy text. Nothing of growkit is asked but its classes of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ("The Cat sat.  On\ta mat!", "def f(x):\n    return x + 1", "Ünï çødé <s> </s> [INST]", "")
ALIKE = 1e-8
"""Of the logit scale: far above rounding in float64."""

LONGEST = 400
GENERATED = 24
OF_THE_SAVING = {"_from_model_config", "transformers_version"}


def difference(source: Path, target: Path, rounding: float = 0.0) -> str | None:
    """In what a target behaves otherwise than its source; None where nothing was found.

    Args:
        source: a folder.
        target: another.
        rounding: what logits differ by where classes compute in float32 whatever their weights are.
    """
    return next(_differences(source, target, max(ALIKE, 10 * rounding)), None)


def rounding(source: Path, target: Path) -> float:
    """The largest difference of logits of two folders that are sound, relative to their scale."""
    first, second = (_load(folder) for folder in (source, target))
    longest = min(_longest(first), LONGEST)
    return max(_error(first, second, each) for each in prompts(first.config.vocab_size, longest))


def _differences(source: Path, target: Path, alike: float) -> Iterator[str]:
    try:
        models = [_load(folder) for folder in (source, target)]
    except Exception as error:  # whatever a class says of a config
        yield f"it does not load: {error}"
        return
    first, second = models
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        was, now = (getattr(model.config, key, None) for model in models)
        if was != now:
            yield f"{key} {was} and {now}"
    yield from _generation(*models)
    longest = min(_longest(first), LONGEST)
    for ids in prompts(first.config.vocab_size, longest):
        error = _error(first, second, ids)
        if not error < alike:
            yield f"logits of {ids.shape[-1]} tokens by {error:.1e}"
    was, now = (_greedy(model) for model in models)
    if was != now:
        yield f"greedy text {was} and {now}"
    yield from _tokenizers(source, target)
    was, now = (_dtype(folder) for folder in (source, target))
    if torch.finfo(now).bits < torch.finfo(was).bits:
        yield f"dtype {was} and {now}"


def prompts(vocabulary: int, longest: int) -> Iterator[torch.Tensor]:
    """Every token once; and one prompt as long as there may be."""
    generator = torch.Generator().manual_seed(5)
    yield torch.randint(vocabulary, (1, longest), generator=generator)
    for part in torch.randperm(vocabulary, generator=generator).split(min(longest, 100)):
        yield part[None]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def _dtype(folder: Path) -> torch.dtype:
    dtype: torch.dtype = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    return dtype


def _longest(model: Any) -> int:
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else LONGEST


def _error(first: Any, second: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        was = first(ids, use_cache=False).logits
        try:
            now = second(ids, use_cache=False).logits[..., : was.shape[-1]]
        except Exception:  # of a table that is too short, say
            return float("inf")
    return float((was - now).abs().max() / was.square().mean().sqrt())


def _greedy(model: Any) -> list[int] | str:
    ids = torch.arange(3, 9)[None] % model.config.vocab_size
    try:
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GENERATED
        )
    except Exception as error:  # of settings that cannot be, and then of both
        return type(error).__name__
    found: list[int] = text[0].tolist()
    return found


def _generation(first: Any, second: Any) -> Iterator[str]:
    was, now = (model.generation_config.to_dict() for model in (first, second))
    for key in sorted((was.keys() | now.keys()) - OF_THE_SAVING):
        if was.get(key) != now.get(key):
            yield f"{key} of generation {was.get(key)} and {now.get(key)}"


def _tokenizers(source: Path, target: Path) -> Iterator[str]:
    if not any((folder / "tokenizer.json").exists() for folder in (source, target)):
        return
    try:
        was, now = (AutoTokenizer.from_pretrained(folder) for folder in (source, target))
    except Exception as error:
        yield f"the tokenizer does not load: {error}"
        return
    for name, ask in ASKED.items():
        one, other = (_answers(ask, each) for each in (was, now))
        if one != other:
            yield f"{name} of the tokenizer {one!r:.80} and {other!r:.80}"


def _answers(ask: Any, tokenizer: Any) -> Any:
    try:
        return ask(tokenizer)
    except Exception as error:
        return type(error).__name__


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
ASKED = {
    "ids": lambda t: [t(text).input_ids for text in TEXTS],
    "ids without special tokens": lambda t: [t.encode(x, add_special_tokens=False) for x in TEXTS],
    "cut ids": lambda t: [t(text * 40, truncation=True, max_length=9).input_ids for text in TEXTS],
    "text": lambda t: t.decode(list(range(3, 200))),
    "text without special tokens": lambda t: t.decode(range(200), skip_special_tokens=True),
    "chat": lambda t: t.apply_chat_template(CHAT, tokenize=False),
    "special tokens": lambda t: (t.special_tokens_map, t.all_special_ids),
    "length": lambda t: t.model_max_length,
    "sides": lambda t: (t.padding_side, t.truncation_side),
    "padding": lambda t: t(list(TEXTS), padding=True).input_ids,
}
