"""What programs get wrong although their weights are right: settings, tokens, conventions.

Each is tried on the source in memory. A setting is another value of a key of the config; a
convention is repeated on the source's tensors, or on the states that its first layer gets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from growkit.base.tensors import Config, cut
from growkit.extras.formats.checks.diagnosis import ROTARY
from growkit.model.model import Model

Values = Callable[[Any, Config], Sequence[Any]]
"""Other values of a key, from its value and the whole config."""


def _of_heads(power: float) -> Values:
    """Powers of the sizes that programs take for that of a head."""

    def values(value: Any, config: Config) -> Sequence[Any]:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        sizes = [config.get("head_dim"), hidden // heads if hidden and heads else None]
        return [size if power == 1 else size**power for size in sizes if size]

    return values


def _of_pairs(value: Any, config: Config) -> Sequence[Any]:
    """Parts of a head that have a whole number of rotary pairs."""
    sizes = _of_heads(1)(value, config)
    return [
        part for part in (1.0, 0.75, 0.5, 0.4, 0.25) if not any(int(s * part) % 2 for s in sizes)
    ]


def _these(*values: Any) -> Values:
    return lambda value, config: values


OFF = 1 << 20
"""A window that no sequence fills."""

WINDOW = r"\w*window(_size)?|attention_chunk_size"
"""Keys of windows, by their last part."""

SETTINGS: tuple[tuple[str, Values], ...] = (
    (r"rope_theta|rope_local_base_freq|rotary_emb_base", _these(1e4, 1e5, 5e5, 1e6)),
    (r"rope_type", _these("default")),
    (r"partial_rotary_factor|rotary_pct", _of_pairs),
    (r"\w*eps(ilon)?", _these(1e-5, 1e-6, 1e-8, 1e-12)),
    (r"\w*softcap(ping)?", _these(None)),
    (WINDOW, lambda value, config: (OFF, value + 1, value - 1, max(1, value // 2), 2 * value)),
    (r"query_pre_attn_scalar", _of_heads(1)),
    (r"attention_multiplier|attn_scale", _of_heads(-0.5)),
    (r"\w*(multiplier|_scal(e|ing)|scaling_factor)", _these(1.0)),
    (
        r"norm_topk_prob|scale_\w+|use_(?!cache)\w+|\w+_interleave|attn_temperature_tuning",
        lambda value, config: (not value,),
    ),
    (
        r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts",
        lambda value, config: (max(1, value - 1), value + 1, 1, max(1, value // 2), 2 * value),
    ),
    (r"n_group|topk_group", _these(1)),
    (r"hidden_act(ivation)?", _these("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")),
)
"""Other values that programs use, by the last part of a key."""

BIASES = {
    " of attention": re.compile(r"\.\w*att\w*\..*\.bias$"),
    " of norms": re.compile(r"norm\w*\.bias$|\.ln_\w+\.bias$"),
    "": re.compile(r"\.bias$"),
}
"""Names of biases that programs leave out together; the last ones are all of them."""


@dataclass(frozen=True, eq=False)
class Guess:
    """Something that a program may compute in another way than the source's class.

    Attributes:
        phrase: what the program does, e.g. ``computes with rms_norm_eps 1e-06 in place of 1e-05``.
        remedy: what to do.
        settings: other values of keys of the config.
        prepended: tokens in front of each sequence.
        dropped: number of tokens that are missing at the start of each sequence.
        late: by how many positions rows of logits come too late.
        edit: another form of a tensor, by its name; None for the same one.
        factor: by which the states that the first layer gets are multiplied.
        scale: by which logits are multiplied.
        form: what is written in place of log-probabilities, [rows, columns].
    """

    phrase: str
    remedy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepended: tuple[int, ...] = ()
    dropped: int = 0
    late: int = 0
    edit: Callable[[str, Tensor], Tensor | None] | None = None
    factor: float = 1.0
    scale: float = 1.0
    form: Callable[[Tensor], Tensor] | None = None

    def ids(self, ids: Tensor) -> Tensor:
        """The tokens that the program sees in place of a sequence, [tokens]."""
        return torch.cat([ids.new_tensor(self.prepended), ids[self.dropped :]])

    @property
    def shift(self) -> int:
        """How much later a position of the sequence is among the tokens that the program sees."""
        return len(self.prepended) - self.dropped - self.late


def guesses_of_settings(config: Config) -> Iterator[Guess]:
    """Other values of the keys of a complete config, and those of layers exchanged."""
    entries = dict(_entries(config))
    for key, value in entries.items():
        last = key.rpartition(".")[2]
        for pattern, values in SETTINGS:
            if value is None or not re.fullmatch(pattern, last):
                continue
            alike = {name: entries[name] for name in entries if name.rpartition(".")[2] == last}
            for other in dict.fromkeys([*values(value, config), *alike.values()]):
                if other != value:
                    yield guess_of_value(key, value, other)
            if len({*alike.values()}) == len(alike) == 2 and key == min(alike):
                one, other = alike
                yield Guess(
                    f"exchanges {one} {_shown(alike[one])} and {other} {_shown(alike[other])}",
                    "exchange them there",
                    {one: alike[other], other: alike[one]},
                )
            break
    yield from _guesses_of_kinds(config)


def guess_of_value(key: str, value: Any, other: Any) -> Guess:
    """Another value of a key of the config; a whole number in place of one."""
    other = round(other) if type(value) is int and isinstance(other, float) else other
    return Guess(
        f"computes with {key} {_shown(other)} in place of {_shown(value)}",
        f"set {key} to {_shown(value)} there",
        {key: other},
    )


def guesses_of_windows(config: Config, first: int) -> Iterator[Guess]:
    """Shorter windows than those of a config, with which a position is the first that differs."""
    for key, value in _entries(config):
        is_window = re.fullmatch(WINDOW, key.rpartition(".")[2]) and type(value) is int
        if is_window and 0 < first < value:
            yield guess_of_value(key, value, first)


def numbers_in(config: Config) -> dict[str, float]:
    """The positive numbers of a complete config that are no sizes, by key."""
    return {
        key: value
        for key, value in _entries(config)
        if (isinstance(value, float) or (type(value) is int and re.search("rope_|scal", key)))
        and 0 < value < math.inf
        and not re.search(r"dropout|initializer|loss", key)
    }


def _guesses_of_kinds(config: Config) -> Iterator[Guess]:
    """Other kinds of layers, where a list has one for each."""
    for key, kinds in config.items():
        if not isinstance(kinds, list) or len(kinds) != config.get("num_hidden_layers"):
            continue
        others = {f"{kind} in all layers": [kind] * len(kinds) for kind in kinds}
        others["the kind of the next layer"] = [*kinds[1:], kinds[0]]
        others["the kind of the layer before"] = [kinds[-1], *kinds[:-1]]
        tried = [kinds]
        for phrase, other in others.items():
            if other not in tried:  # two kinds that alternate are shifted alike both ways
                tried.append(other)
                yield Guess(
                    f"computes with {key} of {phrase}",
                    f"give each layer its own entry of {key} there",
                    {key: other},
                )


def guesses_of_tokens(config: Config) -> Iterator[Guess]:
    """Other tokens than the program says, and rows of logits at other positions."""
    for name in ("bos_token_id", "eos_token_id"):
        token = config.get(name)
        if isinstance(token, int) and not isinstance(token, bool):
            yield Guess(
                f"puts token {token} ({name}) before the sequence",
                "switch off its special tokens, or name the token in ids",
                prepended=(token,),
            )
    yield Guess(
        "leaves out the first token",
        "give it all ids, without a tokenizer of its own",
        dropped=1,
    )
    for late, row in ((1, "after"), (-1, "before")):
        yield Guess(
            f"writes the logits of a position into the row {row} it",
            "write the logits that follow a token into the row of that token",
            late=late,
        )


def guesses_of_conventions(weights: Model, sizes: Mapping[str, int]) -> Iterator[Guess]:
    """Other conventions than those of the class, with the same weights.

    Args:
        weights: the source, under the names of its class.
        sizes: the sizes of its axes; empty if they are not known.
    """
    for phrase, rule in ROTARY.items():
        yield Guess(
            f"has rotary pairs in another order than the class: its {phrase.partition(',')[0][4:]}",
            "choose the other rotary convention there (halves or neighbours)",
            edit=partial(_edited, re.compile(r"[qk]_proj"), partial(_called, rule, sizes)),
        )
    for change, word in ((1.0, "added to"), (-1.0, "subtracted from")):
        yield Guess(
            f"computes with 1 {word} the weights of norms",
            "choose the other convention of norms there (w, or 1 + w)",
            edit=partial(_edited, re.compile("norm"), partial(torch.add, other=change)),
        )
    biases = {frozenset(filter(BIASES[of].search, weights.tensors)): of for of in BIASES}
    for names, of in biases.items():
        if names:
            yield Guess(
                f"leaves out biases{of}",
                "switch on the biases that the model has",
                edit=partial(_edited, BIASES[of], torch.zeros_like),
            )
    hidden = sizes.get("hidden", 0)
    for factor, phrase in ((hidden**-0.5, "√"), (hidden**0.5, "1/√")) if hidden else ():
        yield Guess(
            f"does not multiply embeddings by {phrase}{hidden}"
            if phrase == "√"
            else f"multiplies embeddings by √{hidden}",
            "choose the other scale of embeddings there",
            factor=factor,
        )
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in weights.tensors and weights.tensors.get(embedding) == weights.tensors[head]:
        yield Guess(
            "takes the embedding for its head",
            "switch off tied embeddings there",
            edit=lambda name, tensor: weights.read(embedding) if name == head else None,
        )


def guesses_of_forms(only_top: bool) -> Iterator[Guess]:
    """Other numbers in the file than logits, or than log-probabilities of some tokens."""
    if not only_top:
        yield Guess(
            "writes probabilities in place of logits",
            "write the logits as they are before softmax",
            form=lambda logs: logs.exp().log_softmax(-1),
        )
        return
    for base in (10, 2):
        yield Guess(
            f"writes logarithms to base {base}",
            f"multiply top_logprobs by ln {base} = {math.log(base):.6f}",
            form=partial(torch.mul, other=1 / math.log(base)),
        )
    yield Guess(
        "normalises the probabilities of top_ids alone",
        "normalise over all tokens before some are chosen",
        form=partial(torch.log_softmax, dim=-1),
    )


class Edited(Model):
    """A model of which a guess edits tensors."""

    def __init__(self, weights: Model, edit: Callable[[str, Tensor], Tensor | None]) -> None:
        self.config, self.tensors, self.described = (
            weights.config,
            weights.tensors,
            weights.described,
        )
        self._weights, self._edit = weights, edit

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self._weights.where(name)

    def cuts(self, name: str) -> int:
        """A tensor is edited as a whole."""
        return 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        tensor = self._weights.read(name)
        edited = self._edit(name, tensor)
        return cut(tensor if edited is None else edited.to(tensor.dtype), where)


def _called(rule: Callable[..., Tensor | None], sizes: Mapping[str, int], tensor: Tensor) -> Any:
    return rule(tensor, sizes)


def _edited(
    pattern: re.Pattern[str], change: Callable[[Tensor], Any], name: str, tensor: Tensor
) -> Any:
    return change(tensor) if pattern.search(name) else None


def _entries(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a config that is no list, with its key; a dot leads into a part."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{path}{key}.")
        elif not isinstance(value, list):
            yield f"{path}{key}", value


def _shown(value: Any) -> str:
    if value is None or value == OFF:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
