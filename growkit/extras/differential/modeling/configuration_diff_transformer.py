"""The configuration of a DIFF Transformer: a Llama skeleton, and the switches of its attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import transformers
from transformers.activations import ACT2FN
from transformers.utils.versions import require_version

OLDEST_TRANSFORMERS = "4.57"

require_version(
    f"transformers>={OLDEST_TRANSFORMERS}",
    f"A DIFF Transformer needs it: pip install 'transformers>={OLDEST_TRANSFORMERS}'",
)

BaseConfig: Any = getattr(transformers, "PreTrainedConfig", None)
IS_OLD = BaseConfig is None
"""Whether this is transformers 4, which also has other names for rotary embeddings."""

if IS_OLD:
    BaseConfig = transformers.PretrainedConfig

SWITCHES: dict[str, tuple[str, ...]] = {
    "lambda_type": ("vectors", "projected"),
    "noise_keys": ("own", "shared"),
    "head_norm": ("affine", "plain", "none"),
    "head_output_scale": ("one_minus_lambda_init", "none"),
    "integral": ("none", "causal", "column_mean"),
    "integral_method": ("exact", "series", "auto"),
    "gamma": ("unified", "gated"),
    "qk_projection": ("full", "shared"),
    "shared_scope": ("head", "layer", "all_heads"),
}

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Factors and divisors that must be above 0."""

DERIVED: Any = None
"""Default of a value that follows from other values."""

FORMER_KEYS = {"output_multiplier": "head_output_scale"}
"""Keys of older configs, with their new names. Trainers take the old one for a scale of logits."""


class DiffTransformerConfig(BaseConfig):  # type: ignore[misc]
    """Every published variant of differential attention, and every combination of them.

    The defaults are DIFF (arXiv 2410.05258).

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: query heads, signal and noise together.
        num_noise_heads: noise heads; None for half of all. Signal head i is paired with noise head
            ⌊i · noise / signal⌋. 0 gives softmax attention, fewer than half grouped DIFF.
        num_key_value_heads: key heads, those of noise heads included if they have their own; None
            for one signal key head, and one noise key head, for each noise head (without noise
            heads, for ``num_attention_heads``).
        head_dim: width of a query or key head; None for ``hidden_size // num_attention_heads``.
        value_head_dim: width of a value head, of which every signal key head has one; None
            for ``2 * head_dim``.
        lambda_type: ``vectors`` (four per layer), or ``projected`` per token and signal head
            (V2: a sigmoid).
        lambda_init: one number per layer, added to λ of the vectors; None for the paper's. It
            belongs to the layer and is never recomputed from the layer's index.
        lambda_std_dev: standard deviation of the λ vectors at initialisation.
        noise_keys: ``own`` if noise heads have key heads of their own, ``shared`` if they use those
            of the signal heads (V2).
        head_norm: RMSNorm of every head, ``affine`` (one weight for all heads), ``plain`` (no
            weight) or ``none``.
        head_norm_eps: epsilon of the head norm; None for ``rms_norm_eps``.
        head_output_scale: ``one_minus_lambda_init`` scales the heads after their norm, ``none``
            does not; None for the former where λ comes from vectors, and the latter elsewhere.
        integral: ``none``, ``causal`` (DINT) or ``column_mean`` (DINT as first published, which
            lets tokens see later ones).
        integral_method: how a causal integral is computed: ``exact``; by its ``series``, close and
            several times as fast (see ``differential_attention.integral_series``); or ``auto``, the
            series of long texts. In float64 all are exact.
        gamma: weight of the integral: ``unified`` is λ, ``gated`` is g · λ, with a learnable g per
            layer.
        qk_projection: ``full`` matrices, or ``shared`` bases with low-rank updates (Shared DIFF),
            which keys have only where noise heads have their own.
        shared_scope: ``head``: a base for each group of heads, an update for each head; ``layer``:
            the same bases, one update for all signal and one for all noise heads; ``all_heads``:
            one base for all heads, an update for each head.
        shared_rank: rank of the updates, or a list with the rank of each layer.
        hidden_act: activation of the MLP; ``poly_norm`` is Motif's (arXiv 2411.03884).
        max_position_embeddings: longest context.
        initializer_range: standard deviation of new weights.
        rms_norm_eps: epsilon of the RMSNorms.
        use_cache: whether keys and values are cached by default.
        pad_token_id: token id of padding.
        bos_token_id: token id that begins a text.
        eos_token_id: token ids that end a text.
        tie_word_embeddings: whether the output head is the embedding.
        rope_parameters: see transformers' Llama.
        attention_bias: whether q, k, v and o have biases.
        attention_output_bias: whether o has a bias; None for ``attention_bias``.
        mlp_bias: whether the MLP has biases.
        qk_norm: whether an RMSNorm precedes the rotation of every query and key head, with one
            weight for all query heads and one for all key heads.
        attention_multiplier: factor of the scores; None for ``1 / √head_dim``.
        embedding_multiplier: factor of the token embeddings.
        residual_multiplier: factor of the outputs of attention and MLP.
        logits_scaling: divisor of the logits.
        **kwargs: passed on to transformers.

    Raises:
        ValueError: a value is unknown, or the combination is impossible.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_noise_heads: int = DERIVED
    num_key_value_heads: int = DERIVED
    head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    lambda_type: str = "vectors"
    lambda_init: Sequence[float] | None = None
    lambda_std_dev: float = 0.1
    noise_keys: str = "own"
    head_norm: str = "affine"
    head_norm_eps: float = DERIVED
    head_output_scale: str = DERIVED
    integral: str = "none"
    integral_method: str = "exact"
    gamma: str = "unified"
    qk_projection: str = "full"
    shared_scope: str = "head"
    shared_rank: int | list[int] | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = DERIVED
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_multiplier: float = DERIVED
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __init__(self, **kwargs: Any) -> None:
        for former, name in FORMER_KEYS.items():  # the former key never becomes an attribute
            value = kwargs.pop(former, None)
            kwargs[name] = value if kwargs.get(name) is None else kwargs[name]
        for name in DiffTransformerConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(DiffTransformerConfig, name)))
        for key in ("sliding_window", "layer_types"):
            if kwargs.get(key):
                raise ValueError(
                    f"{key} is {kwargs[key]!r}; a DIFF Transformer has no windows, remove the key"
                )
        self._derive()
        problems = self._switch_problems, self._head_problems, self._other_problems
        for problem in chain.from_iterable(find() for find in problems):
            raise ValueError(problem)
        own = dict(vars(self))
        super().__init__(**kwargs)
        if IS_OLD:
            for name, value in own.items():  # transformers sets some of these again
                setattr(self, name, value)
            rope = dict(self.rope_parameters or {})
            self.rope_theta = rope.pop("rope_theta", getattr(self, "rope_theta", 10000.0))
            if rope.get("rope_type", "default") != "default":
                self.rope_scaling = rope

    def _derive(self) -> None:
        """Derive the values that were left out."""

        def default(name: str, value: Any) -> None:
            if getattr(self, name) is None:
                setattr(self, name, value)

        default("rms_norm_eps", 1e-6)
        default("num_noise_heads", self.num_attention_heads // 2)
        groups = self.num_noise_heads or self.num_attention_heads
        default("num_key_value_heads", groups * (2 if self.has_noise_keys else 1))
        default("head_dim", self.hidden_size // max(self.num_attention_heads, 1))
        default("value_head_dim", 2 * self.head_dim)
        default("head_norm_eps", self.rms_norm_eps)
        default("attention_output_bias", self.attention_bias)
        default("attention_multiplier", max(self.head_dim, 1) ** -0.5)  # validated below
        vectors = self.lambda_type == "vectors" and self.num_noise_heads
        default("head_output_scale", "one_minus_lambda_init" if vectors else "none")
        if self.lambda_init is None and vectors:
            # arXiv 2410.05258, layers counted from 0
            layers = range(self.num_hidden_layers)
            self.lambda_init = [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in layers]
        elif self.lambda_init is not None:
            self.lambda_init = [float(value) for value in self.lambda_init]
        # A mean over all rows changes with every token, so nothing can be cached.
        self.use_cache = self.use_cache and self.integral != "column_mean"

    @property
    def num_signal_heads(self) -> int:
        """Number of signal heads; only these have an output."""
        return self.num_attention_heads - self.num_noise_heads

    @property
    def has_noise_keys(self) -> bool:
        """Whether noise heads have key heads of their own."""
        return self.num_noise_heads > 0 and self.noise_keys == "own"

    @property
    def num_value_heads(self) -> int:
        """Number of value heads, which is also the number of signal key heads."""
        return self.num_key_value_heads // 2 if self.has_noise_keys else self.num_key_value_heads

    def rank(self, layer: int) -> int:
        """Rank of the updates of a layer."""
        assert self.shared_rank is not None
        return self.shared_rank[layer] if isinstance(self.shared_rank, list) else self.shared_rank

    def _head_problems(self) -> Iterator[str]:
        """Find wrong numbers and widths of heads; later checks rely on earlier ones."""
        signal, noise = self.num_signal_heads, self.num_noise_heads
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "value_head_dim"):
            if getattr(self, key) < 1:
                yield f"{key} is {getattr(self, key)}; at least 1 is needed"
        if noise < 0 or signal < 1:
            yield f"num_noise_heads is {noise}; 0 or more must leave at least 1 signal head"
        if self.head_dim % 2:
            yield f"head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even"
        if noise and signal % noise:
            yield f"{signal} signal heads are not a multiple of num_noise_heads {noise}"
        if self.has_noise_keys and self.num_key_value_heads % 2:
            yield (
                f"num_key_value_heads is {self.num_key_value_heads}; half of them belong to noise "
                "heads, so it must be even"
            )
        for kind, count in (("signal", signal), ("noise", noise)):
            if count % self.num_value_heads:
                yield (
                    f"{count} {kind} heads are not a multiple of the {self.num_value_heads} value "
                    f"heads that they share (num_key_value_heads {self.num_key_value_heads})"
                )

    def _other_problems(self) -> Iterator[str]:
        """Find other wrong numbers, and unknown activations."""
        limits = [(key, 1.0, "between 0 and 1") for key in ("rms_norm_eps", "head_norm_eps")]
        limits += [(key, math.inf, "above 0") for key in MULTIPLIERS]
        for key, limit, expected in limits:
            value = getattr(self, key)
            number = isinstance(value, float | int) and not isinstance(value, bool)
            if not number or not 0 < value < limit:
                yield f"{key} is {value!r}; a number {expected} was expected"
        if self.hidden_act != "poly_norm" and self.hidden_act not in ACT2FN:
            yield f"hidden_act is {self.hidden_act!r}; choose poly_norm or one of transformers'"

    def _switch_problems(self) -> Iterator[str]:
        """Find unknown values of switches, and switches whose requirements are missing."""
        for switch, choices in SWITCHES.items():
            if getattr(self, switch) not in choices:
                yield f"{switch} is {getattr(self, switch)!r}; choose one of {', '.join(choices)}"
        noise, layers = self.num_noise_heads, self.num_hidden_layers
        needed = ["lambda_type 'vectors'"] if noise and self.lambda_type == "vectors" else []
        needed += ["head_output_scale"] if self.head_output_scale != "none" else []
        if self.lambda_init is None and needed:
            yield f"{' and '.join(needed)} need lambda_init, one number per layer"
        if self.lambda_init is not None and len(self.lambda_init) != layers:
            yield f"lambda_init has {len(self.lambda_init)} numbers for {layers} layers"
        for switch in ("integral", "qk_projection"):
            if noise == 0 and getattr(self, switch) not in ("none", "full"):
                why = "there is no λ without them" if switch == "integral" else "they share bases"
                yield f"{switch} {getattr(self, switch)!r} needs noise heads: {why}"
        if self.integral == "column_mean" and self.integral_method != "exact":
            yield f"integral_method {self.integral_method!r} needs integral 'causal'"
        ranks = self.shared_rank if isinstance(self.shared_rank, list) else [self.shared_rank]
        fit = len(ranks) == layers or not isinstance(self.shared_rank, list)
        if self.qk_projection == "shared" and not (
            fit and all(type(rank) is int and rank > 0 for rank in ranks)
        ):
            yield (
                f"shared_rank is {self.shared_rank!r}; qk_projection 'shared' needs the rank of "
                "its updates, at least 1, or a list with one for each layer"
            )
