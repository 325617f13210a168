"""Odd pickles, alone and in the archives of torch."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from random import Random

from tests.fuzz.contents import damaged
from tests.fuzz.values import HOSTILE, WHOLE, odd


def odd_pickle(random: Random, content: bytes) -> bytes:
    """A ``.bin`` file whose archive, pickle or byte order is odd."""
    kind = random.random()
    if kind < 0.2:
        return damaged(random, content)
    if kind < 0.25:
        return pickle.dumps(odd(random), protocol=random.randrange(6))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members = _other_members(random, members)
    made = io.BytesIO()
    squeeze = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(made, "w", squeeze) as archive:
        for name, member in members.items():
            archive.writestr(zipfile.ZipInfo(name or "x"), member)
    return made.getvalue() if random.random() < 0.9 else damaged(random, made.getvalue())


def _other_members(random: Random, members: dict[str, bytes]) -> dict[str, bytes]:
    """The files in an archive, one of them changed."""
    root = next(iter(members)).split("/")[0]
    name = random.choice(list(members))
    what = random.randrange(12)
    if what < 5:
        members[f"{root}/data.pkl"] = _other_pickle(random, members[f"{root}/data.pkl"])
    elif what == 5:
        members[f"{root}/byteorder"] = random.choice([b"big", b"", b"middle", b"little\n", b"\xff"])
    elif what == 6:
        members.pop(name)
    elif what == 7:
        members[name] = damaged(random, members[name])
    elif what == 8:
        members[name] = members[name][: random.randrange(len(members[name]) + 1)]
    elif what == 9:
        members[name.replace(root, random.choice(["other", "", "..", "/a"]), 1)] = members.pop(name)
    elif what == 10:
        record = random.choice(["version", ".format_version", "byteorder", "constants.pkl"])
        members[f"{root}/{record}"] = random.choice([b"", b"0", b"99", b"-1", b"big", b"x" * 1000])
    else:
        members = {name: members[name] for name in random.sample(list(members), len(members))}
    return members


CALLS = [
    *("os system", "builtins eval", "builtins getattr", "torch.storage _load_from_bytes"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_sparse_tensor", "torch Size"),
    *("torch._utils _rebuild_parameter", "torch._utils _rebuild_qtensor", "torch device"),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch IntStorage", "torch BoolStorage"),
    *("collections OrderedDict", "collections Counter", "torch.serialization _get_layout"),
    *("torch.nn.parameter Parameter", "torch HalfStorage", "torch._tensor _rebuild_from_type_v2"),
    *("torch ComplexFloatStorage", "torch DoubleStorage", "torch.storage UntypedStorage"),
]


def _other_pickle(random: Random, content: bytes) -> bytes:
    """A pickle with one opcode changed: another number, another name, left out, said twice."""
    opcodes = list(pickletools.genops(content))
    begins = [position or 0 for _, _, position in opcodes] + [len(content)]
    at = random.randrange(len(opcodes))
    opcode, argument, _ = opcodes[at]
    mine = content[begins[at] : begins[at + 1]]
    if isinstance(argument, int) and opcode.name.startswith("BININT"):
        mine = b"J" + struct.pack("<i", random.choice([-1, 0, 1, 5, 1000, 2**31 - 1, -(2**31)]))
        if random.random() < 0.3:
            large = random.choice(WHOLE).to_bytes(200, "little", signed=True).rstrip(b"\0") + b"\0"
            mine = b"\x8a" + bytes([min(len(large), 255)]) + large[:255]
    elif opcode.name == "GLOBAL":
        module, name = random.choice(CALLS).split()
        mine = f"c{module}\n{name}\n".encode()
    elif isinstance(argument, str) and "UNICODE" in opcode.name:
        text = random.choice([*HOSTILE, "cuda:0", "meta", "0", "1"]).encode(errors="surrogatepass")
        mine = b"X" + struct.pack("<I", len(text)) + text
    else:
        mine = random.choice(
            [b"", mine * 2, b"N", b"\x88", b"}", b"]", b"0", b"\x89", mine + b"\x85R"]
        )
    return content[: begins[at]] + mine + content[begins[at + 1] :]
