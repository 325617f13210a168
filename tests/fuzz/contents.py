"""Odd contents of files: bytes, weights, YAML."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

import yaml

from tests.fuzz.values import HOSTILE, RAW, change, json_text, words

DTYPES = words(
    "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E8M0 F4 F6_E2M3 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64 "
    "f32 F128 float32"
)
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6}
LARGEST = 1 << 20

Header = dict[str, Any]


def damaged(random: Random, content: bytes) -> bytes:
    """Some bytes, changed without regard to what they mean."""
    content = content or b"{}"
    for _ in range(random.choice([1, 1, 2, 4])):
        at = random.randrange(len(content) + 1)
        size = random.choice([1, 1, 2, 8, 64])
        some = random.choice(
            [
                random.randbytes(size),
                random.choice(HOSTILE).encode("utf-8", errors="surrogatepass")[:100],
                random.choice([b"\0", b"{", b"}", b"[", b'"', b",", b":", b"\xff", b"\n", b"NaN"]),
                content[at : at + size] * 2,
            ]
        )
        what = random.randrange(12)
        if what == 0:
            content = content[:at]
        elif what == 1:
            content = content[at:]
        elif what == 2:
            content = content[:at] + content[at + size :]
        elif what < 6:
            content = content[:at] + some + content[at:]
        elif what == 6:
            content = random.choice([b"", b"\xef\xbb\xbf" + content, content + b"\0" * 100, b"\0"])
        elif what == 7:
            text = content.decode("utf-8", errors="replace")
            content = text.encode(random.choice(["utf-16", "utf-32", "utf-8-sig"]))
        else:
            content = content[:at] + some + content[at + len(some) :]
    return content[:LARGEST]


def parse_safetensors(content: bytes) -> tuple[Header, bytes]:
    """The header and the data of a file of weights."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def safetensors(header: bytes, data: bytes, size: int | None = None) -> bytes:
    """A file of weights."""
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def odd_safetensors(random: Random, content: bytes) -> bytes:
    """A file of weights with an odd header, or one that is sound but not of this model."""
    header, data = parse_safetensors(content)
    kind = random.random()
    if kind < 0.1:
        return damaged(random, content)
    if kind < 0.15:
        size = random.choice([0, 1, 7, 100_000_001, 2**63, 2**64 - 1, len(content)])
        return safetensors(json.dumps(header).encode(), data, size)
    if kind < 0.45:
        return safetensors(json_text(random, change(random, header, list(header))), data)
    described = {name: dict(entry) for name, entry in header.items() if name != "__metadata__"}
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _other_tensor(random, described)
    return sound_safetensors(described, random)


def _other_tensor(random: Random, described: dict[str, dict[str, Any]]) -> None:
    name = random.choice(list(described) or ["x"])
    entry = described.setdefault(name, {"dtype": "F32", "shape": [1]})
    what = random.randrange(10)
    if what < 3:
        entry["dtype"] = random.choice(DTYPES)
    elif what < 6:
        shape = list(entry["shape"])
        place = random.randrange(len(shape) + 1)
        size = random.choice([0, 1, 2, 3, 7, 8, 16, 1000])
        shape[place : place + random.randrange(2)] = [size]
        entry["shape"] = random.choice(
            [shape, shape[::-1], shape[1:], [], [1, *shape], [*shape, 1]]
        )
    elif what == 6:
        del described[name]
    elif what == 7:
        described[_other_name(random, name)] = described.pop(name)
    elif what == 8:
        described[_other_name(random, name)] = dict(entry)
    else:
        for entry in described.values():
            entry["dtype"] = random.choice(DTYPES[:10])


def _other_name(random: Random, name: str) -> str:
    layer = random.choice(["1", "2", "-1", "00", "999999999", "9" * 30, "x", "", "0.0"])
    at = random.randrange(len(name) + 1)
    return random.choice(
        [
            name.replace(".0.", f".{layer}."),
            name[:at] + random.choice(HOSTILE)[:1000] + name[at:],
            "_orig_mod." + name,
            name.removeprefix("model."),
            name.replace("weight", random.choice(["bias", "weight_scale", "lora_A.weight", "g"])),
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            random.choice(HOSTILE) or "x",
        ]
    )


def sound_safetensors(described: dict[str, dict[str, Any]], random: Random) -> bytes:
    """A file whose header and data fit each other, as far as its dtypes and shapes let them."""
    header: Header = {}
    end = 0
    for name, entry in described.items():
        count = 1
        for size in entry["shape"]:
            count *= size
        begin = end
        end = min(begin + count * BITS.get(entry["dtype"], 8) // 8, LARGEST)
        shape = entry["shape"]
        header[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [begin, end]}
    fill = random.choice([b"\0", b"\x3c", b"\x3c", b"\x3c", b"\xff", b"\x7f"])
    if random.random() < 0.1:
        header["__metadata__"] = random.choice(
            [{"format": "pt"}, {"format": "tf"}, {}, {"a": "\n"}]
        )
    return safetensors(json_text(random, header), fill * end)


YAML = [
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "? !!python/object/apply:os.system ['touch canary']\n: 1\n",
    "!!python/name:os.system\n",
    "&a [*a]\n",
    "source: source\nsource: other\noutput: out\nsteps: [{grow: hypercloning, hidden: x2}]\n",
    "source: source\noutput: out\nsteps: [{grow: hypercloning, hidden: x2, hidden: x4}]\n",
    "<<: {source: source, output: out}\nsteps: [{grow: hypercloning, hidden: x2}]\n",
    "--- a\n--- b\n",
    "\t- a\n",
    "source: 2026-11-22\noutput: 12:30:45\nsteps: [{grow: 0o17}]\n",
    "%YAML 9.9\n---\nsource: a\n",
    "source: !!binary aGVsbG8=\noutput: !!set {a, b}\nsteps: !!omap [a: 1]\n",
    "? [a, b]\n: c\n",
    "? {a: b}\n: c\n",
    "- " * 1500 + "a",
    "[" * 1200,
    "a: " + "{b: " * 400,
    "source: source\noutput: out\nsteps: &s [{grow: hypercloning, hidden: x2}, *s]\n",
    "source: &s source\noutput: *s\nsteps: [{grow: hypercloning}]\n",
    "steps: &a\n  - *a\nsource: source\noutput: out\n",
    "verify: {seed: 1e400, prompts: .inf, length: .nan}\nsource: source\noutput: out\nsteps: []\n",
    "seed: 0b111\nsource: source\noutput: out\nsteps: [{grow: hypercloning, hidden: 1_0}]\n",
    "seed: 190:20:30\nsource: source\noutput: out\nsteps: [{grow: hypercloning, hidden: x2}]\n",
    "seed: 9" + "9" * 6000 + "\nsource: source\noutput: out\nsteps: [{grow: hypercloning}]\n",
    "seed: 2026-99-99\nsource: source\noutput: out\nsteps: [{grow: hypercloning}]\n",
    "seed: 0x" + "f" * 6000 + "\nsource: source\noutput: out\nsteps: [{grow: hypercloning}]\n",
]


def yaml_text(random: Random, tree: Any) -> bytes:
    """A tree as YAML, with keys that stand twice or are merged now and then."""
    try:
        text = yaml.safe_dump(
            tree, allow_unicode=True, default_flow_style=random.choice([None, True])
        )
    except (yaml.YAMLError, ValueError, RecursionError):
        return json_text(random, tree)  # which YAML reads as well
    for name, raw in RAW.items():
        text = text.replace(name, raw)
    if random.random() < 0.05 and isinstance(tree, dict) and tree:
        text += f"{random.choice(list(tree))}: {random.choice(['1', '[]', 'x', '{a: b}'])}\n"
    return text.encode("utf-8", errors="surrogatepass")
