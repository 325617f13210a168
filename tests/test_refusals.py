"""What cannot be grown or converted is refused in a sentence, and nothing is written.

Sources here are sound; for what is wrong with them see ``tests.test_trust``, for the command line
``tests.test_mistakes``.
"""

from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.base.errors import InputError
from tests.conftest import edit_config, save_model

Options = dict[str, Any]
Row = tuple[str, Options, Options, Options, str]
"""A type, settings of its model, what is changed in ``config.json``, options, and the sentence."""

GROUPED = {"num_noise_heads": 1}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
SCALES = {"embedding_multiplier": 1.7, "residual_multiplier": 0.8, "attention_multiplier": 0.3}
FOUR_LAYERS, FOUR_EXPERTS = {"num_hidden_layers": 4}, {"num_local_experts": 4}
DINT = {"integral": "causal"}
INVERSE = {"scale_attn_by_inverse_layer_idx": True}
FEW = FOUR_LAYERS | {"num_experts": 4, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
DEEPSEEK = FOUR_LAYERS | LATENT | {"v_head_dim": 4, "n_routed_experts": 4}
DEEPSEEK |= {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4}


def to(name: str, **options: Any) -> Options:
    return {"to": name, **options}


def grow(method: str = "hypercloning", **options: Any) -> Options:
    return {"method": method, **options}


CONVERSIONS: list[Row] = [
    ("diff_transformer", GROUPED, {}, to("gda"), r"it is grouped already"),
    ("diff_transformer", DINT, {}, to("dint"), r"an integral already"),
    ("qwen3", {}, WINDOWS | LAYERS, to("diff-v2"), "layer_types .*'sliding_attention'"),
    (
        "qwen3",
        {},
        {"thinking_budget": 3},
        to("diff-v2"),
        "thinking_budget 3, which growkit does not",
    ),
    ("granite", {}, {"attention_multiplier": "0.3"}, to("diff-v2"), "attention_multiplier '0.3'"),
    ("granite", {}, {"logits_scaling": -1.5}, to("diff-v2"), "logits_scaling -1.5: logits_scaling"),
    ("qwen3", {}, {}, to("llama"), "qk_norm True .it has False."),
    ("qwen2", {}, {}, to("llama"), "attention_output_bias False .it has True."),
    ("granite", SCALES, {}, to("mistral"), "residual_multiplier 0.8 .it has 1.0."),
    ("qwen3", WINDOWS, {}, to("output-gate"), "has use_sliding_window True"),
]
TWICE, STACK = grow("depth", layers="x2"), grow("depth", layers="x2", blocks="stack")
DEPTH: list[Row] = [
    ("opt", {"do_layer_norm_before": False}, {}, TWICE, "choose --blocks stack, overlap or inter"),
    ("gpt2", INVERSE, {}, grow("depth", place=[0]), "with scale_attn_by_inv.*--place end"),
    ("gpt2", INVERSE, {}, STACK, "put identity blocks at the end"),
    ("deepseek_v2", DEEPSEEK, {}, STACK, "--blocks identity or interpose"),
    ("deepseek_v2", DEEPSEEK, {"first_k_dense_replace": "1"}, TWICE, "a whole number was ex"),
    ("qwen3_moe", FEW, {"decoder_sparse_step": 0}, TWICE, "a number from 1 upwards"),
    ("qwen3_moe", FEW, {"mlp_only_layers": "1"}, TWICE, "a list was expected"),
    ("llama", FOUR_LAYERS, {"layer_types": ["full_attention"]}, TWICE, "a list of 4 was exp"),
]
EXPERTS: list[Row] = [
    (
        "llama",
        {"attention_bias": True},
        {},
        grow("upcycle", experts=8),
        "no place for tensor .*bias",
    ),
    ("qwen3", WINDOWS, {}, grow("upcycle", experts=8), "use_sliding_window True"),
    ("olmo", {}, {}, grow("upcycle", experts=8), r"these can: .*llama \(Mixtral\)"),
    ("mixtral", {}, {}, grow("upcycle", experts=8), "already has experts; --method experts"),
    *(
        ("mixtral", FOUR_EXPERTS, {}, grow("experts", **options), why)
        for options, why in (
            ({"experts": 6}, "cannot all be copied equally often; choose 8"),
            ({"experts": "x3"}, "power of two; choose one that is, or --symmetry keep"),
            ({"experts": 8, "top_k": 9}, "top_k 9 is more than 8 experts"),
            ({"experts": 6, "copies": "2,2,1,1"}, "copies requires --top-k"),
            ({"experts": 6, "top_k": 2, "copies": "2,2,1,2"}, "4 numbers with the sum 6"),
            ({"experts": 6, "top_k": 2, "copies": "2,2,1,1/3,1,1,1/3,1,1,1"}, "each of 2 layers"),
        )
    ),
]
WIDTH: list[Row] = [
    ("diffllama", {}, {"num_attention_heads": 3}, grow(hidden="x2"), "is 3.*multiple of 2"),
    ("nemotron", {}, {"num_key_value_heads": None}, grow(hidden="x2"), "needs num_key_value_heads"),
    (
        "mixtral",
        FOUR_EXPERTS,
        {"num_local_experts": 5},
        grow(hidden="x2"),
        r"tensor .*\.gate\.weight",
    ),
    (
        "olmo",
        {"tie_word_embeddings": True},
        {},
        grow(hidden="x2"),
        "set tie_word_embeddings to false",
    ),
    ("falcon", {"alibi": True}, {}, grow(heads="x2"), "slopes"),
    (
        "gemma",
        {},
        {},
        grow(hidden="x2"),
        "embed_tokens.* which rounds; hidden can grow by powers of",
    ),
    ("gemma2", {}, {}, grow(hidden="x2"), "powers of four"),
    ("gemma3_text", {}, {}, grow(hidden="x2"), "powers of four"),
    ("mamba", {}, {}, grow(heads="x2"), "has no heads to grow"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "edits", "options", "why"), [*CONVERSIONS, *DEPTH, *EXPERTS, *WIDTH]
)
def test_it_is_refused(
    kind: str, settings: Options, edits: Options, options: Options, why: str, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "source", kind, **settings)
    edit_config(source, **edits)
    work = growkit.convert if "to" in options else growkit.grow
    with pytest.raises(InputError, match=why):
        work(source, tmp_path / "out", verify=False, **options)
    assert [*tmp_path.iterdir()] == [source]


def test_keys_that_are_off_change_nothing(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    edit_config(source, final_logit_softcapping=None, whatever=None)
    made = growkit.convert(source, tmp_path / "out", "diff-v2", verify=False)
    assert made["promise"] == "exact"
