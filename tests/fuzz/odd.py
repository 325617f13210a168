"""Odd values, trees of values, and contents of files: bytes, JSON, YAML, weights, archives."""

import copy
import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from safetensors.torch import load, save

from growkit.extras.formats.weight_formats.gguf import ALIGNMENT, _entry, _Header


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


WHOLE = [
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64, 255, 1000, 65_536, 99_999_999, 10**9, 10**12),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**400),
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
    *(words("1e3 1_000 ٣ ² 0x10 1.0 x0 x-1 x99999999 X2 2x 16,12 auto")),
]
SEEDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("seeds.yaml").read_text("utf-8"))
"""What the fuzzer begins with."""

WORDS, DTYPES = words(SEEDS["words"]), words(SEEDS["dtypes"])
# What only text can say: it takes the place of a string once the rest is text.
RAW = {
    "§digits§": "1" + "0" * 5000,
    "§deep§": "[" * 3000 + "]" * 3000,
    "§objects§": '{"a":' * 5000 + "1" + "}" * 5000,
    "§1e999§": "1e999",
    "§bare§": "bare",
    "§comment§": "1 /* one */",
}
DEEP_IN_YAML = {"§deep§": "[" * 100 + "]" * 100}  # more would take a second to refuse
LARGEST = 1 << 20


def odd(random: Random, depth: int = 0) -> Any:
    """A value of any type."""
    plain = [WHOLE, REAL, HOSTILE, WORDS, [None, True, False], list(RAW), [[], {}]]
    kind = random.choices(range(9), [30, 12, 18, 16, 8, 3, 3, 6, 4])[0]
    if kind < len(plain) or depth > 2:
        return random.choice(plain[min(kind, 6)])
    if kind == 7:
        return [odd(random, depth + 1) for _ in range(random.choice([1, 1, 2, 3, 8]))]
    return {random.choice(HOSTILE): odd(random, depth + 1) for _ in range(random.randrange(1, 4))}


def near(random: Random, value: Any) -> Any:
    """Something like a value, but not it."""
    wrapped = [[value], {"0": value}, str(value)]
    if isinstance(value, bool):
        return random.choice([not value, int(value), str(value).lower(), None])
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, -value, value * 2, value // 2, *wrapped])
    if isinstance(value, float):
        return random.choice([-value, value * 2, value / 3, value + 1e-9, *wrapped])
    if isinstance(value, str):
        at = random.randrange(len(value) + 1)
        longer = value[:at] + random.choice(HOSTILE) + value[at:]
        return random.choice([longer, value[:at] + value[at + 1 :], value.upper(), [value]])
    if isinstance(value, list):
        return random.choice([value * 2, value[1:], value[:-1], value[::-1], *wrapped])
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
    node = tree
    while random.random() < 0.6:
        inside = node.values() if isinstance(node, dict) else node
        below = [each for each in inside if isinstance(each, dict | list) and each]
        if not below:
            break
        node = random.choice(below)
    key = random.choice(keys) if keys and random.random() < 0.9 else random.choice(HOSTILE)
    places = list(node) if isinstance(node, dict) else list(range(len(node)))
    what = random.randrange(12) if places else 11
    at = random.choice(places) if places else 0
    if what < 4:
        node[at] = odd(random)
    elif what < 7:
        node[at] = near(random, node[at])
    elif what == 7:
        del node[at]
    elif what == 8:
        node[at] = copy.deepcopy(node[random.choice(places)])
    elif isinstance(node, list):
        node.insert(at, odd(random))
    else:
        node[key] = node.pop(at) if what == 9 else odd(random)
    return tree


def json_text(random: Random, tree: Any) -> bytes:
    """A tree as JSON, in one of the ways in which it can be written, or nearly so."""
    text = json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice([None, 2]))
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name, ensure_ascii=False), raw)
        text = text.replace(json.dumps(name), raw)
    if random.random() < 0.03 and isinstance(tree, dict) and tree:  # a key that is there twice
        key = json.dumps(random.choice(list(tree)))
        text = text.replace("{", "{" + f"{key}: {json.dumps(odd(random))},", 1)
    return text.encode("utf-8", errors="surrogatepass")


def yaml_text(random: Random, tree: Any) -> bytes:
    """A tree as YAML."""
    flow = random.choice([None, True])
    try:
        text = yaml.safe_dump(tree, allow_unicode=True, default_flow_style=flow)
    except (yaml.YAMLError, ValueError, RecursionError):
        return json_text(random, tree)  # which YAML reads as well
    for name, raw in (RAW | DEEP_IN_YAML).items():
        text = text.replace(name, raw)
    return text.encode("utf-8", errors="surrogatepass")


def damaged(random: Random, content: bytes) -> bytes:
    """Some bytes, changed without regard to what they mean."""
    for _ in range(random.choice([1, 1, 2, 4])):
        content = _damage_once(random, content or b"{}")
    return content[:LARGEST]


def _damage_once(random: Random, content: bytes) -> bytes:
    at = random.randrange(len(content) + 1)
    size = random.choice([1, 1, 2, 8, 64])
    signs = [b"\0", b"{", b"}", b"[", b'"', b",", b":", b"\xff", b"\n", b"NaN"]
    hostile = random.choice(HOSTILE).encode("utf-8", errors="surrogatepass")[:100]
    twice = content[at : at + size] * 2
    some = random.choice([random.randbytes(size), hostile, random.choice(signs), twice])
    what = random.randrange(12)
    if what < 3:
        return random.choice([content[:at], content[at:], content[:at] + content[at + size :]])
    if what < 6:
        return content[:at] + some + content[at:]
    if what < 10:
        return content[:at] + some + content[at + len(some) :]
    if what == 10:
        return random.choice([b"", b"\xef\xbb\xbf" + content, content + b"\0" * 100, b"\0"])
    text = content.decode("utf-8", errors="replace")
    return text.encode(random.choice(["utf-16", "utf-32", "utf-8-sig"]))


# --- Weights --------------------------------------------------------------------------------------


def odd_safetensors(random: Random, content: bytes) -> bytes:
    """A file of weights with an odd header, or one that is sound but not of this model."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    kind = random.random()
    if kind < 0.1:
        return damaged(random, content)
    if kind < 0.15:
        claimed = random.choice([0, 1, 7, 100_000_001, 2**63, 2**64 - 1, len(content)])
        return struct.pack("<Q", claimed) + content[8:]
    if kind < 0.45:
        text = json_text(random, change(random, header, list(header)))
        return struct.pack("<Q", len(text)) + text + data
    tensors = dict(sorted(load(content).items()))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _other_tensor(random, tensors)
    return save(
        tensors, random.choice([{"format": "tf"}, {}, {"a": "\n"}, *[{"format": "pt"}] * 9])
    )


def _other_tensor(random: Random, tensors: dict[str, torch.Tensor]) -> None:
    name = random.choice(list(tensors) or ["x"])
    tensor = tensors.pop(name, torch.ones(1))
    layer = random.choice(["1", "2", "-1", "00", "999999999", "9" * 30, "x", "", "0.0"])
    part = random.choice(["bias", "weight_scale", "lora_A.weight", "g"])
    others = [name.replace(".0.", f".{layer}."), name.replace("weight", part), f"_orig_mod.{name}"]
    other = random.choice([*others, name.removeprefix("model."), random.choice(HOSTILE) or "x"])
    other = other.encode(errors="replace").decode()
    sizes = [random.choice([0, 1, 2, 3, 7, 8, 16, 300]) for _ in range(random.randrange(3))]
    what = random.randrange(10)
    if what < 3:
        tensors[name] = tensor.real.contiguous().to(getattr(torch, random.choice(DTYPES)))
    elif what < 6:
        fill = random.choice([0.0, 1.0, 1.0, 1.0, float("nan"), 3e38])
        filled = torch.full(sizes, fill).to(tensor.dtype)
        tensors[name] = random.choice([filled, tensor[None], tensor.flatten()])
    elif what < 8:
        tensors[other] = tensor
    elif what == 8:
        tensors |= {name: tensor, other: tensor.clone()}


def odd_archive(random: Random, content: bytes) -> bytes:
    """A ``.bin`` file whose archive, pickle or byte order is odd."""
    kind = random.random()
    if kind < 0.25:
        plain = pickle.dumps(odd(random), protocol=random.randrange(6))
        return damaged(random, content) if kind < 0.2 else plain
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).split("/")[0]
    name = random.choice(list(members))
    what = random.randrange(10)
    if what < 5:
        members[f"{root}/data.pkl"] = odd_pickle(random, members[f"{root}/data.pkl"])
    elif what == 5:
        record = random.choice(["byteorder", "version", ".format_version", "constants.pkl"])
        content = random.choice([b"big", b"", b"middle", b"99", b"-1", b"\xff", b"x" * 1000])
        members[f"{root}/{record}"] = content
    elif what == 6:
        del members[name]
    elif what == 7:
        members[name] = damaged(random, members[name])
    elif what == 8:
        members[name] = members[name][: random.randrange(len(members[name]) + 1)]
    else:
        members[name.replace(root, random.choice(["other", "", "..", "/a"]), 1)] = members.pop(name)
    made = io.BytesIO()
    squeeze = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(made, "w", squeeze) as archive:
        for name, member in members.items():
            archive.writestr(zipfile.ZipInfo(name or "x"), member)
    return made.getvalue()


def odd_pickle(random: Random, content: bytes) -> bytes:
    """A pickle with one opcode changed: another number, another name, left out, twice."""
    if content[2:3] == pickle.FRAME:  # a frame states its length, and may be left out
        content = content[:2] + content[11:]
    opcodes = list(pickletools.genops(content))
    begins = [position or 0 for _, _, position in opcodes] + [len(content)]
    at = random.randrange(len(opcodes))
    opcode, argument, _ = opcodes[at]
    mine = content[begins[at] : begins[at + 1]]
    if isinstance(argument, int) and opcode.name.startswith("BININT"):
        large = random.choice(WHOLE).to_bytes(200, "little", signed=True)
        small = struct.pack("<i", random.choice([-1, 0, 1, 5, 1000, 2**31 - 1, -(2**31)]))
        mine = random.choice([b"J" + small, b"J" + small, b"\x8a\xc8" + large])
    elif opcode.name == "GLOBAL":
        module, name = random.choice(SEEDS["calls"]).split()
        mine = f"c{module}\n{name}\n".encode()
    elif isinstance(argument, str) and "UNICODE" in opcode.name:
        named = [*HOSTILE, "cuda:0", "meta", "0", "1", *words(" ".join(SEEDS["calls"]))]
        text = random.choice(named).encode(errors="surrogatepass")
        mine = b"X" + struct.pack("<I", len(text)) + text
    else:
        mine = random.choice([b"", mine * 2, b"N", b"\x88", b"}", b"]", b"0", mine + b"\x85R"])
    return content[: begins[at]] + mine + content[begins[at + 1] :]


# --- GGUF -----------------------------------------------------------------------------------------


class _Fields(_Header):
    """Notes where everything in the header of a GGUF file lies."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), "it")
        self.places: list[tuple[int, int]] = []

    def take(self, count: int) -> bytes:
        self.places.append((self.at, count))
        return super().take(count)


@lru_cache
def _fields(content: bytes) -> _Fields:
    header = _Fields(content)
    *_, tensors, count = header.numbers("4sIQQ")
    for _ in range(count):
        header.text()
        header.value(*header.numbers("I"))
    for _ in range(tensors):
        _entry(header)
    return header


def odd_gguf(random: Random, content: bytes) -> bytes:
    """A GGUF file whose header says something else; the tensors still begin where it ends."""
    if random.random() < 0.1:
        return damaged(random, content)
    fields = _fields(content)
    header, data = content[: fields.at], content[-(-fields.at // ALIGNMENT) * ALIGNMENT :]
    chosen = random.choices(range(len(fields.places)), k=random.choice([1, 1, 1, 2, 3]))
    for number in sorted({*chosen}, reverse=True):
        begin, size = fields.places[number]
        of_length = slice(begin - 8, begin)
        if header[of_length] == _length(size):
            other, length = random.choice(fields.places)
            known = content[other : other + length].decode("latin-1")
            own = near(random, header[begin : begin + size].decode())
            text = str(random.choice([own, known, known, random.choice(HOSTILE)]))
            text = text.encode("utf-8", errors="surrogatepass")
            header = header[: begin - 8] + _length(len(text)) + text + header[begin + size :]
        elif size:
            at = begin + random.randrange(0, size, 4)
            header = header[:at] + _odd_word(random) + header[at + 4 :]
    return header + bytes(-len(header) % ALIGNMENT) + data


def _length(number: int) -> bytes:
    return struct.pack("<Q", number)


def _odd_word(random: Random) -> bytes:
    """Four bytes: a whole number, a part of one, or a floating-point number."""
    real = random.choice([each for each in REAL if abs(each) < 3e38 or not math.isfinite(each)])
    whole = random.choice([*range(13), 30, 32, *WHOLE]) >> random.choice([0, 0, 32])
    return random.choice([struct.pack("<I", whole % (1 << 32)), struct.pack("<f", real)])
