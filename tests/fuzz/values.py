"""Odd values, and odd changes to what JSON and YAML can say."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


WHOLE = [
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64, 255, 1000, 65_536, 99_999_999, 10**9, 10**12),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30),
    10**400,
]
REAL = [
    *(0.0, -0.0, 0.5, 1.0, 2.0, -1.5, 1e-8, 1e-320, 5e-324, 1e38, 1e39, 1.7e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
]
HOSTILE = [
    *("", " ", "x", "x2", "nan", "-1", "0", "null", "true", "\n", "a\nb", "\r", "\t", "a\0b"),
    *("\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202egnp.exe", "\u2028", "\ufeff", "é", "模型"),
    *("\ud800", "\udcff", "%s%n", "{0.__class__}", "../../etc/passwd", "/dev/zero", "/dev/stdin"),
    *("elsewhere/secret.txt", "../elsewhere/secret.txt", "source", ".", "..", "/", "~", "a" * 300),
    *("a/b", "a\\b", "CON", "-", "--", "--json", "a" * 5000, "model.safetensors", "config.json"),
    *("os.system", "__import__('os')", "org/kernel", "canary.Model", "org/name--canary.Model"),
    *(
        "1e3",
        "1_000",
        "٣",
        "²",
        "0x10",
        "1.0",
        "x0",
        "x-1",
        "x99999999",
        "X2",
        "2x",
        "16,12",
        "auto",
    ),
]
WORDS = words(
    "linear dynamic yarn longrope llama3 default proportional su mrope silu gelu relu poly_norm "
    "polynorm swish gelu_pytorch_tanh linear float16 bfloat16 float32 float64 float8_e4m3fn "
    "torch.float16 int8 auto eager sdpa flash_attention_2 flex_attention paged|sdpa none own "
    "shared vectors projected affine plain causal column_mean gated unified full llama mistral "
    "diffllama diff_transformer Motif microsoft_diff gpt2 bert microsoft_diff_v2 mixtral "
    "qwen3_moe full_attention sliding_attention bnb LlamaForCausalLM DiffLlamaForCausalLM "
    "LlamaModel GPT2LMHeadModel NoSuchClass"
)
# What only text can say: it takes the place of a string once the rest is text.
RAW = {
    "§digits§": "1" + "0" * 5000,
    "§deep§": "[" * 3000 + "]" * 3000,
    "§objects§": '{"a":' * 5000 + "1" + "}" * 5000,
    "§1e999§": "1e999",
    "§-0§": "-0",
    "§hex§": "0x10",
    "§bare§": "bare",
    "§comment§": "1 /* one */",
}


def odd(random: Random, depth: int = 0) -> Any:
    """A value of any type."""
    kind = random.randrange(100)
    if kind < 30:
        return random.choice(WHOLE)
    if kind < 42:
        return random.choice(REAL)
    if kind < 60:
        return random.choice(HOSTILE)
    if kind < 76:
        return random.choice(WORDS)
    if kind < 84:
        return random.choice([None, True, False])
    if kind < 87:
        return random.choice(list(RAW))
    if depth > 2 or kind < 90:
        return random.choice([[], {}])
    if kind < 96:
        return [odd(random, depth + 1) for _ in range(random.choice([1, 1, 2, 3, 8]))]
    return {random.choice(HOSTILE): odd(random, depth + 1) for _ in range(random.randrange(1, 4))}


def near(random: Random, value: Any) -> Any:
    """Something like a value, but not it."""
    if isinstance(value, bool):
        return random.choice([not value, int(value), str(value).lower(), None])
    if isinstance(value, int):
        factors = [value * 2, value * 3, value // 2, value * 10**6]
        return random.choice(
            [
                value + 1,
                value - 1,
                -value,
                f"{value}.0",
                str(value),
                [value],
                {"0": value},
                *factors,
            ]
        )
    if isinstance(value, float):
        return random.choice([-value, value * 2, value / 3, value + 1e-9, str(value), [value]])
    if isinstance(value, str):
        at = random.randrange(len(value) + 1)
        return random.choice(
            [
                value[:at] + random.choice(HOSTILE) + value[at:],
                value[:at] + value[at + 1 :],
                value.upper(),
                value + " ",
                [value],
                {"value": value},
            ]
        )
    if isinstance(value, list):
        return random.choice([value * 2, value[1:], value[:-1], value[::-1], [value], {"0": value}])
    if isinstance(value, dict):
        return random.choice([[value], list(value), {str(k).upper(): v for k, v in value.items()}])
    return odd(random)


def change(random: Random, tree: Any, keys: Sequence[str]) -> Any:
    """A copy of a tree of dictionaries and lists with one to four odd changes.

    Args:
        random: decides.
        tree: what is changed.
        keys: what may be added.
    """
    changed = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 2, 3, 4])):
        changed = _change_once(random, changed, keys)
    return changed


def _change_once(random: Random, tree: Any, keys: Sequence[str]) -> Any:
    if not isinstance(tree, dict | list) or random.random() < 0.005:
        return odd(random)
    node = _somewhere(random, tree)
    places = list(node) if isinstance(node, dict) else list(range(len(node)))
    if isinstance(node, dict) and (not places or random.random() < 0.25):
        key = random.choice(keys) if keys and random.random() < 0.9 else random.choice(HOSTILE)
        node[key] = odd(random)
        return tree
    if not places:
        node.append(odd(random))
        return tree
    at = random.choice(places)
    what = random.randrange(10)
    if what < 4:
        node[at] = odd(random)
    elif what < 7:
        node[at] = near(random, node[at])
    elif what == 7:
        del node[at]
    elif what == 8:
        node[at] = copy.deepcopy(node[random.choice(places)])
    elif isinstance(node, dict):
        node[random.choice(keys) if keys else random.choice(HOSTILE)] = node.pop(at)
    else:
        node.insert(at, odd(random))
    return tree


def _somewhere(random: Random, tree: Any) -> Any:
    """A dictionary or a list in a tree, or the tree itself."""
    below = [v for v in (tree.values() if isinstance(tree, dict) else tree) if _holds(v)]
    if not below or random.random() < 0.4:
        return tree
    return _somewhere(random, random.choice(below))


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def json_text(random: Random, tree: Any) -> bytes:
    """A tree as JSON, in one of the ways in which it can be written, or nearly so."""
    text = json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice([None, 2]))
    for name, raw in RAW.items():
        if name in text or json.dumps(name) in text:
            text = text.replace(json.dumps(name, ensure_ascii=False), raw)
            text = text.replace(json.dumps(name), raw)
    if random.random() < 0.03 and isinstance(tree, dict) and tree:  # a key that stands twice
        key = json.dumps(random.choice(list(tree)))
        text = text.replace("{", "{" + f"{key}: {json.dumps(odd(random))},", 1)
    return text.encode("utf-8", errors="surrogatepass")
