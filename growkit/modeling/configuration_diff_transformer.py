"""The configuration of a DIFF Transformer: a Llama skeleton, and the switches of its attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import transformers
from transformers.activations import ACT2FN

OLDEST_TRANSFORMERS = 5

if int(transformers.__version__.partition(".")[0]) < OLDEST_TRANSFORMERS:
    raise ImportError(
        f"a DIFF Transformer needs transformers {OLDEST_TRANSFORMERS} or later, but transformers "
        f"{transformers.__version__} is installed; install another with "
        f"pip install 'transformers>={OLDEST_TRANSFORMERS}'"
    )

SWITCHES: dict[str, tuple[str, ...]] = {
    "lambda_type": ("vectors", "projected"),
    "noise_keys": ("own", "shared"),
    "head_norm": ("affine", "plain", "none"),
    "head_output_scale": ("one_minus_lambda_init", "none"),
    "integral": ("none", "causal", "column_mean"),
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
"""Numbers by which something is multiplied, or divided."""

FORMER_KEYS = {"output_multiplier": "head_output_scale"}
"""Keys of older configs, and their names today. Trainers read the old one as a scale of logits."""


class DiffTransformerConfig(transformers.PreTrainedConfig):
    """Every published variant of differential attention, and every combination of them.

    The defaults are DIFF (arXiv 2410.05258).

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: query heads, signal and noise together.
        num_noise_heads: noise heads; None for half of all. Signal head i is paired with noise head
            ⌊i · noise / signal⌋. 0 is softmax attention, fewer than half is grouped DIFF.
        num_key_value_heads: key heads, for signal and noise together where noise heads have their
            own; None for ``num_attention_heads`` with as many noise as signal heads, and for twice
            the noise heads otherwise.
        head_dim: width of a query or key head; None for ``hidden_size // num_attention_heads``.
        value_head_dim: width of a value head, of which there is one for every signal key head; None
            for ``2 * head_dim``.
        lambda_type: ``vectors`` (four per layer), or ``projected`` per token and signal head
            (V2: a sigmoid).
        lambda_init: one number per layer, added to λ of the vectors; None for the paper's. It is
            never computed again from a layer's index.
        lambda_std_dev: of the λ vectors at initialisation.
        noise_keys: ``own`` key heads for noise heads, or the signal's, ``shared`` (V2).
        head_norm: RMSNorm of every head, ``affine`` (one weight for all heads), ``plain`` or
            ``none``.
        head_norm_eps: of the head norm; None for ``rms_norm_eps``.
        head_output_scale: ``one_minus_lambda_init`` scales the heads after their norm; None for
            that where λ comes from vectors, and ``none`` elsewhere.
        integral: ``none``, ``causal`` (DINT) or ``column_mean`` (DINT as first published, which
            lets tokens see later ones).
        gamma: weight of the integral: ``unified`` is λ, ``gated`` is g · λ, with a learnable g per
            layer.
        qk_projection: ``full`` matrices, or ``shared`` bases with low-rank updates (Shared DIFF);
            keys only where noise heads have their own.
        shared_scope: ``head``: a base for each group of heads, an update for each head; ``layer``:
            the same bases, one update for all signal and one for all noise heads; ``all_heads``:
            one base for all heads, an update for each.
        shared_rank: rank of the updates, or a list with one for each layer.
        hidden_act: activation of the MLP; ``poly_norm`` is Motif's (arXiv 2411.03884).
        max_position_embeddings: longest context.
        initializer_range: standard deviation of new weights.
        rms_norm_eps: of the RMSNorms.
        use_cache: whether keys and values are cached by default.
        pad_token_id: token id of padding.
        bos_token_id: token id that begins a text.
        eos_token_id: token id that ends one.
        tie_word_embeddings: whether the output head is the embedding.
        rope_parameters: see transformers' Llama.
        attention_bias: whether q, k, v and o have biases.
        attention_output_bias: whether o has one; None for ``attention_bias``.
        mlp_bias: whether the MLP has.
        qk_norm: whether every query and key head goes through an RMSNorm before it is rotated, with
            one weight for all queries and one for all keys.
        attention_multiplier: of the scores; None for ``1 / √head_dim``.
        embedding_multiplier: of what tokens are embedded as.
        residual_multiplier: of what attention and MLP add to the hidden states.
        logits_scaling: what logits are divided by.
        **kwargs: for transformers.

    Raises:
        ValueError: a value is unknown, or the combination is impossible; says why.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        intermediate_size: int = 8192,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 32,
        num_noise_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        lambda_type: str = "vectors",
        lambda_init: Sequence[float] | None = None,
        lambda_std_dev: float = 0.1,
        noise_keys: str = "own",
        head_norm: str = "affine",
        head_norm_eps: float | None = None,
        head_output_scale: str | None = None,
        integral: str = "none",
        gamma: str = "unified",
        qk_projection: str = "full",
        shared_scope: str = "head",
        shared_rank: int | list[int] | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        rms_norm_eps: float | None = 1e-6,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        tie_word_embeddings: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        attention_bias: bool = False,
        attention_output_bias: bool | None = None,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        attention_multiplier: float | None = None,
        embedding_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if num_attention_heads < 1:
            raise ValueError(f"num_attention_heads is {num_attention_heads}; at least 1 is needed")
        for former in FORMER_KEYS:  # never an attribute
            value = kwargs.pop(former, None)
            head_output_scale = value if head_output_scale is None else head_output_scale
        rms_norm_eps = 1e-6 if rms_norm_eps is None else rms_norm_eps
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_noise_heads = (
            num_attention_heads // 2 if num_noise_heads is None else num_noise_heads
        )
        self.lambda_type = lambda_type
        self.noise_keys = noise_keys
        if num_key_value_heads is None:
            signal = num_attention_heads - self.num_noise_heads
            groups = self.num_noise_heads or signal
            num_key_value_heads = groups * (2 if self.has_noise_keys else 1)
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.value_head_dim = 2 * self.head_dim if value_head_dim is None else value_head_dim
        if lambda_init is None and lambda_type == "vectors" and self.num_noise_heads:
            lambda_init = default_lambda_init(num_hidden_layers)
        self.lambda_init = None if lambda_init is None else [float(each) for each in lambda_init]
        self.lambda_std_dev = lambda_std_dev
        self.head_norm = head_norm
        self.head_norm_eps = rms_norm_eps if head_norm_eps is None else head_norm_eps
        if head_output_scale is None:
            vectors = lambda_type == "vectors" and self.num_noise_heads
            head_output_scale = "one_minus_lambda_init" if vectors else "none"
        self.head_output_scale = head_output_scale
        self.integral = integral
        self.gamma = gamma
        self.qk_projection = qk_projection
        self.shared_scope = shared_scope
        self.shared_rank = shared_rank
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        # A mean over all rows changes with every token: nothing of earlier layers could be kept.
        self.use_cache = use_cache and integral != "column_mean"
        self.rope_parameters = rope_parameters
        self.attention_bias = attention_bias
        self.attention_output_bias = (
            attention_bias if attention_output_bias is None else attention_output_bias
        )
        self.mlp_bias = mlp_bias
        self.qk_norm = qk_norm
        self.attention_multiplier = (
            max(self.head_dim, 1) ** -0.5  # validated below
            if attention_multiplier is None
            else attention_multiplier
        )
        self.embedding_multiplier = embedding_multiplier
        self.residual_multiplier = residual_multiplier
        self.logits_scaling = logits_scaling
        # Not every version of transformers makes attributes of these.
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self._check()
        for key in ("sliding_window", "layer_types"):
            if kwargs.get(key):
                raise ValueError(
                    f"{key} is {kwargs[key]!r}; a DIFF Transformer has no windows, remove the key"
                )
        super().__init__(**kwargs)

    @property
    def num_signal_heads(self) -> int:
        """Number of signal heads, which are those with an output."""
        return self.num_attention_heads - self.num_noise_heads

    @property
    def has_noise_keys(self) -> bool:
        """Whether noise heads have keys of their own."""
        return self.num_noise_heads > 0 and self.noise_keys == "own"

    @property
    def num_value_heads(self) -> int:
        """Number of value heads, and of signal key heads."""
        return self.num_key_value_heads // 2 if self.has_noise_keys else self.num_key_value_heads

    def rank(self, layer: int) -> int:
        """Rank of the updates of a layer."""
        assert self.shared_rank is not None
        return self.shared_rank[layer] if isinstance(self.shared_rank, list) else self.shared_rank

    def _check(self) -> None:
        for switch, choices in SWITCHES.items():
            if getattr(self, switch) not in choices:
                raise ValueError(
                    f"{switch} is {getattr(self, switch)!r}; choose one of {', '.join(choices)}"
                )
        self._check_heads()
        self._check_numbers()
        self._check_lambda()
        if self.hidden_act != "poly_norm" and self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; choose poly_norm or an activation that "
                "transformers knows, such as silu"
            )
        if self.num_noise_heads == 0 and self.integral != "none":
            raise ValueError(
                f"integral {self.integral!r} needs noise heads: its weight γ is a multiple of λ, "
                "and without noise heads there is no λ; set num_noise_heads or integral 'none'"
            )
        if self.qk_projection == "shared":
            if self.num_noise_heads == 0:
                raise ValueError(
                    "qk_projection 'shared' needs noise heads, which share a base with their "
                    "signal heads; set num_noise_heads or qk_projection 'full'"
                )
            ranks = self.shared_rank
            listed = ranks if isinstance(ranks, list) else [ranks] * self.num_hidden_layers
            if len(listed) != self.num_hidden_layers or not all(
                type(rank) is int and rank >= 1 for rank in listed
            ):
                raise ValueError(
                    f"shared_rank is {ranks!r}; qk_projection 'shared' needs the rank of its "
                    "updates, at least 1, or a list with one for each layer"
                )

    def _check_heads(self) -> None:
        signal, noise = self.num_signal_heads, self.num_noise_heads
        if noise < 0 or signal < 1:
            raise ValueError(
                f"num_noise_heads is {noise} of num_attention_heads {self.num_attention_heads}; "
                "it must be 0 or more, and leave at least 1 signal head"
            )
        for key in ("num_key_value_heads", "head_dim", "value_head_dim"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; at least 1 is needed")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if noise and signal % noise:
            raise ValueError(
                f"{signal} signal heads are no multiple of num_noise_heads {noise}; each noise "
                "head serves a whole group of signal heads"
            )
        if self.has_noise_keys and self.num_key_value_heads % 2:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it counts key heads of signal "
                "and noise together, and must be even"
            )
        for kind, count in (("signal", signal), ("noise", noise)):
            if count % self.num_value_heads:
                raise ValueError(
                    f"{count} {kind} heads are no multiple of the {self.num_value_heads} value "
                    f"heads (num_key_value_heads {self.num_key_value_heads}); each value head "
                    f"serves a whole group of {kind} heads"
                )

    def _check_numbers(self) -> None:
        for key in ("rms_norm_eps", "head_norm_eps"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, float | int) or not 0 < value < 1:
                raise ValueError(f"{key} is {value!r}; a number between 0 and 1 was expected")
        for key in MULTIPLIERS:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0:
                raise ValueError(f"{key} is {value!r}; a number above 0 was expected")

    def _check_lambda(self) -> None:
        needed = [
            name
            for name, needs in (
                ("lambda_type 'vectors'", self.num_noise_heads and self.lambda_type == "vectors"),
                ("head_output_scale", self.head_output_scale != "none"),
            )
            if needs
        ]
        if self.lambda_init is None:
            if needed:
                raise ValueError(f"{' and '.join(needed)} need lambda_init, one number per layer")
        elif len(self.lambda_init) != self.num_hidden_layers:
            raise ValueError(
                f"lambda_init has {len(self.lambda_init)} numbers for {self.num_hidden_layers} "
                "layers; it needs one per layer"
            )


def default_lambda_init(layers: int) -> list[float]:
    """λ_init as in arXiv 2410.05258: 0.8 - 0.6 · exp(-0.3 · layer), layers counted from 0."""
    return [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(layers)]
