"""Weights are read as the libraries read them, and what these refuse is refused in one sentence."""

import io
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.weight_file import MAX_HEADER, WeightFile, open_weights
from tests.files import Called, edit_json, edit_weights
from tests.models import Make, relative_error, same_bits, save_model

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"


def odd_tensors() -> Tensors:
    """Of every dtype that torch and safetensors share and growkit reads, and of odd shapes."""
    numbers = torch.arange(24).view(4, 6)
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    kinds += (torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return {
        **{str(kind): numbers.to(kind) for kind in kinds},
        "bool": numbers > 3,
        "rank 0": torch.tensor(2.5),
        "rank 4": torch.rand(2, 3, 2, 2),
        "nothing": torch.zeros(0, 3),
        "no columns": torch.zeros(3, 0),
    }


def check_reading(file: WeightFile, expected: Tensors) -> None:
    assert file.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert file.tensors[name].shape == tuple(tensor.shape)
        assert file.tensors[name].bytes == tensor.numel() * tensor.element_size()
        with strict_float64():  # whatever dtype is wanted around it
            assert same_bits(file.read(name, None), tensor)
        for rows in (slice(0, 1), slice(1, 3), slice(2, None), slice(2, 2)):
            if tensor.dim():
                assert same_bits(file.read(name, rows), tensor[rows]), (name, rows)


def test_safetensors_as_the_library_reads_them(tmp_path: Path) -> None:
    save_file(odd_tensors(), tmp_path / "model.safetensors", {"format": "pt", "note": "×"})
    file = open_weights(Folder(tmp_path), "model.safetensors")
    check_reading(file, load_file(tmp_path / "model.safetensors"))


def header_of(content: bytes) -> tuple[bytes, bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return content[8 : 8 + length], content[8 + length :]


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def mutated(content: bytes, random: random.Random) -> bytes:
    """Some characters of the header replaced by others that stand in headers."""
    header, data = header_of(content)
    text = bytearray(header)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(text))
        kind = random.randrange(3)
        if kind == 0:
            text[at] = random.choice(b'0123456789[]{},:"FB-. \\u')
        elif kind == 1:
            del text[at]
        else:
            text[at:at] = bytes([random.choice(b'0123456789[]{},:"')])
    return with_header(bytes(text), data)


def test_headers_that_the_library_refuses_are_refused(tmp_path: Path) -> None:
    """Whatever is taken, the library takes as well, and finds the same in it."""
    small = {"a": torch.rand(2, 3), "b": torch.arange(4), "c": torch.zeros(0)}
    save_file(small, tmp_path / "model.safetensors", {"format": "pt"})
    content = (tmp_path / "model.safetensors").read_bytes()
    generator, taken = random.Random(0), 0
    for _ in range(1500):
        (tmp_path / "model.safetensors").write_bytes(mutated(content, generator))
        try:
            file = open_weights(Folder(tmp_path), "model.safetensors")
        except InputError:
            continue
        taken += 1
        found = load_file(tmp_path / "model.safetensors")
        assert all(same_bits(file.read(name, None), tensor) for name, tensor in found.items())
        assert file.tensors.keys() == found.keys()
    assert taken > 50


ONE = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
HEADERS = {
    "two of a name": f'{{"a":{{{ONE}}},"a":{{{ONE}}}}}',
    "a name with a line break": f'{{"a\\n\\u001b[31m":{{{ONE}}}}}',
    "a long name": f'{{"{"x" * 10**6}":{{{ONE}}}}}',
    "half of a pair in a name": f'{{"\\ud800":{{{ONE}}}}}',
    "metadata that is no text": f'{{"__metadata__":{{"a":1}},"a":{{{ONE}}}}}',
    "metadata with a key twice": f'{{"__metadata__":{{"a":"","a":""}},"a":{{{ONE}}}}}',
    "too large": '{"a":{"dtype":"F32","shape":[1000000000000,1000000],"data_offsets":[0,4]}}',
    "nothing of a size": '{"a":{"dtype":"F32","shape":[0,%s],"data_offsets":[0,0]}}' % ("9" * 19),
    "a negative size": '{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
    "a size that is true": '{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "many dimensions": '{"a":{"dtype":"F32","shape":[%s1],"data_offsets":[0,4]}}' % ("1," * 10**5),
    "an unknown dtype": '{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}',
    "overlapping data": f'{{"a":{{{ONE}}},"b":{{{ONE}}}}}',
    "a hole": '{"a":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}',
    "no data": "{}",
    "a large header": " " * (MAX_HEADER + 1),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_odd_headers(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(with_header(HEADERS[kind].encode(), b"1234"))
    with pytest.raises(InputError) as error:
        open_weights(Folder(tmp_path), file.name)
    assert str(file) in str(error.value)
    assert str(error.value).isprintable()
    file.write_bytes(with_header(f'{{"__metadata__":null,"a":{{{ONE}}}}}'.encode(), b"1234"))
    assert open_weights(Folder(tmp_path), file.name).tensors["a"].shape == (1,)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.uint8])
def test_models_of_integers(kind: torch.dtype, tmp_path: Path) -> None:
    """One tensor beside the weights does not matter; weights must be floats."""
    source = save_model(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3).to(kind)}
    save_file(tensors | beside, source / "model.safetensors", {"format": "pt"})
    assert Checkpoint(source).tensors.keys() == tensors.keys() | beside.keys()
    whole = {name: tensor.to(kind) for name, tensor in tensors.items()}
    save_file(whole, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="no weights of a float dtype"):
        Checkpoint(source)


# -- files that change while they are read


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_that_is_cut_off_while_it_is_read(suffix: str, tmp_path: Path) -> None:
    """Mapped, it would end the process with SIGBUS."""
    source = save_model(tmp_path / "source", "llama", vocab_size=5000)
    if suffix != "safetensors":
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    checkpoint = Checkpoint(source)
    name = "model.embed_tokens.weight"
    before = checkpoint.read(name)
    os.truncate(checkpoint.files[0], 5000)
    with pytest.raises(InputError, match="has changed while it was read"):
        checkpoint.read(name)
    with pytest.raises(InputError, match="has changed while it was read"):
        checkpoint.read(name, slice(4000, 4100))
    assert before.shape == (5000, 16)
    os.replace(save_model(tmp_path / "other", "llama") / "model.safetensors", checkpoint.files[0])
    with pytest.raises(InputError, match="has changed while it was read"):
        checkpoint.read(name)


# -- pytorch_model.bin


def opened(folder: Path, content: Any) -> WeightFile:
    torch.save(content, folder / "pytorch_model.bin")
    return open_weights(Folder(folder), "pytorch_model.bin")


def test_torch_files_as_torch_reads_them(tmp_path: Path) -> None:
    large = torch.rand(10, 10)
    content = {
        **odd_tensors(),
        "turned": large.t(),
        "every second": large[1::2, ::3],
        "first": large[:4],
        "again": large[:4],
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "repeated": torch.rand(6, 1).expand(6, 1),
    }
    file = opened(tmp_path, content)
    check_reading(file, torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert file.cuts("first")
    assert not file.cuts("turned")
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match=r"since version 1\.6"):
        open_weights(Folder(tmp_path), "pytorch_model.bin")


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)},
    "complex": lambda: {"a": torch.ones(3, dtype=torch.complex128)},
    "one number a billion times": lambda: {"a": torch.ones(1).expand(10**9)},
    "on no device": lambda: {"a": torch.ones(3, device="meta")},
    "steering": lambda: {"a\n\x1b[31m": torch.ones(3)},
    "nested": lambda: {"model": {"a": torch.ones(3)}},
    "a tensor": lambda: torch.ones(3),
    "a number": lambda: {"a": 3},
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
@pytest.mark.filterwarnings("ignore")
def test_torch_files_that_are_not_plain(kind: str, tmp_path: Path) -> None:
    told = r"pytorch_model\.bin.*that under 'model'" if kind == "nested" else r"pytorch_model\.bin"
    with pytest.raises(InputError, match=told):
        opened(tmp_path, NOT_PLAIN[kind]())


def rewritten(file: Path, change: Callable[[str, bytes], bytes | None], kind: int = 0) -> None:
    """Write an archive anew, with other records or compressed."""
    with zipfile.ZipFile(file) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in records:
            changed = change(name, content)
            if changed is not None:
                archive.writestr(name, changed)


def with_record(
    ending: str, change: Callable[[bytes], bytes | None], kind: int = 0
) -> Callable[[Path], None]:
    """Write an archive anew, in which the records of an ending are others."""
    return lambda file: rewritten(
        file, lambda name, data: change(data) if name.endswith(ending) else data, kind
    )


ARCHIVES: dict[str, Callable[[Path], Any]] = {
    "other byte order": with_record("byteorder", lambda data: b"big"),
    "compressed": with_record("", lambda data: data, zipfile.ZIP_DEFLATED),
    "a bomb": with_record("data.pkl", lambda data: bytes(10**8), zipfile.ZIP_DEFLATED),
    "a large pickle": with_record("data.pkl", lambda data: data + bytes(10**7)),
    "cut off": with_record("data/0", lambda data: data[:-4]),
    "without data": with_record("data/0", lambda data: None),
    "nothing": lambda f: f.write_bytes(b"PK\x05\x06" + bytes(18)),
    "half": lambda f: f.write_bytes(f.read_bytes()[:300]),
    "many brackets": lambda f: f.write_bytes(b"\x80\x02" + b"]" * 10**6 + b"."),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives(kind: str, tmp_path: Path) -> None:
    content = {"a": torch.rand(100), "b": torch.rand(3)}
    assert opened(tmp_path, content).read("a", None).equal(content["a"])
    file = tmp_path / "pytorch_model.bin"
    rewritten(file, lambda _, data: data)  # by another library: the control
    found = open_weights(Folder(tmp_path), file.name)
    assert all(found.read(name, None).equal(tensor) for name, tensor in content.items())
    ARCHIVES[kind](file)
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        open_weights(Folder(tmp_path), file.name)


class Storage:
    """Stands for the storage of a forged tensor."""


def forge(file: Path, begin: Any, size: Any, stride: Any, count: Any = 24) -> None:
    """Write an archive with one storage of 24 numbers, and a tensor that says where it lies."""
    stream = io.BytesIO()

    class Writer(pickle._Pickler):  # type: ignore[name-defined]
        def persistent_id(self, thing: Any) -> Any:
            found = isinstance(thing, Storage)
            return ("storage", torch.FloatStorage, "0", "cpu", count) if found else None

    rebuilt = Storage(), begin, size, stride, False, OrderedDict()
    Writer(stream, 2).dump({"a": Called(torch._utils._rebuild_tensor_v2, *rebuilt)})
    numbers = torch.arange(24.0).numpy().tobytes()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (
            ("data.pkl", stream.getvalue()),
            ("byteorder", b"little"),
            ("data/0", numbers),
            ("data/1", numbers),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)


@pytest.mark.parametrize(
    "forged",
    [
        *((1, (4, 6), (6, 1)), (10**15, (4, 6), (6, 1)), (-1, (4, 6), (6, 1)), (0, (4,), (8,))),
        *((0, (10**9, 10**9), (10**9, 1)), (0, (4, 6), (6, 10**12)), (20, (4,), (-2,))),
        *((0, (-1, 6), (6, 1)), (0, (4, 6), (6,)), (0, (2**62, 2), (0, 0)), (0, (25,), (0,))),
        *((0, (4, 6), (6, 1), count) for count in (-1, 0, 23, 25, 48, 10**18, "x", None)),
    ],
    ids=str,
)
def test_tensors_beyond_their_storage(forged: tuple[Any, ...], tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    forge(file, *forged)
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        open_weights(Folder(tmp_path), file.name)
    forge(file, 3, (3, 2), (1, 5))
    expected = torch.arange(24.0).as_strided((3, 2), (1, 5), 3)
    assert torch.load(file, weights_only=True)["a"].equal(expected)
    assert open_weights(Folder(tmp_path), file.name).read("a", None).equal(expected)


def test_index_and_headers_agree(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", shard_size="4KB")
    index = source / "model.safetensors.index.json"
    with edit_json(index) as content:
        with safe_open(source / content["weight_map"][UP], framework="pt") as shard:
            assert same_bits(Checkpoint(source).read(UP), shard.get_tensor(UP))
        content["weight_map"][UP] = content["weight_map"]["lm_head.weight"]
    with pytest.raises(InputError, match="where the index lists it"):
        Checkpoint(source)


def rename_tensors(folder: Path, change: Callable[[str], str]) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({change(name): each for name, each in load_file(file).items()}, file)
    for file in folder.glob("*.index.json"):
        with edit_json(file) as index:
            index["weight_map"] = {change(k): v for k, v in index["weight_map"].items()}


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": "_orig_mod.{}".format,
    "parallel": "module.{}".format,
    "both": "module._orig_mod.{}".format,
    "sharded": lambda name: re.sub(r"(layers\.\d+\.|^)", r"\1_fsdp_wrapped_module.", name),
    "checkpointed": lambda name: re.sub(r"(\d\.)", r"\1_checkpoint_wrapped_module.", name),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", WRAPPED)
def test_names_with_parts_of_wrappers(how: str, make: Make, tmp_path: Path) -> None:
    plain = make("llama", shard_size="8KB")
    source, out = shutil.copytree(plain, tmp_path / "source"), tmp_path / "out"
    rename_tensors(source, WRAPPED[how])
    result = growkit.grow(source, out, hidden="x2", verify=growkit.Settings(prompts=1, length=8))
    assert result.kept
    assert "transformers does not read" in result.warnings[0]
    assert relative_error(plain, out) < 1e-12
    rename_tensors(out, WRAPPED[how])
    with pytest.raises(InputError, match="but users would not"):
        growkit.verify(source, out, prompts=1, length=8)


def test_names_that_wrappers_make_equal(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    with edit_weights(source) as tensors:
        tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"] + 1
    with pytest.raises(InputError, match=r"_orig_mod\.model\.norm\.weight .* remove the one"):
        growkit.grow(source, tmp_path / "out", hidden="x2")
    rename_tensors(source, lambda name: f"student.{name.removeprefix('_orig_mod.')}")
    with pytest.raises(InputError, match=r"leave student\. out of the names"):
        growkit.grow(source, tmp_path / "out", hidden="x2")


def test_weights_that_are_not_read_are_named(make: Make, tmp_path: Path) -> None:
    source = make("llama", shard_size="8KB")
    shards = sorted(file.name for file in source.glob("model-*"))
    spare = "model-00009-of-00009.safetensors"
    shutil.copy(source / shards[0], source / spare)
    run: Any = {"hidden": "x2", "dry_run": True}
    (warning,) = growkit.grow(source, tmp_path / "out", **run).warnings
    assert f"and not from {spare};" in warning
    (source / spare).unlink()
    tensors = {name: each for shard in shards for name, each in load_file(source / shard).items()}
    assert growkit.grow(source, tmp_path / "out", **run).warnings == []
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (warning,) = growkit.grow(source, tmp_path / "out", **run).warnings
    assert all(name in warning for name in (shards[0], "model.safetensors.index.json"))
    save_file({name: 0 * each for name, each in tensors.items()}, source / "model.safetensors")
    with pytest.raises(InputError, match=rf"only logits of zero.* and not from {shards[0]}"):
        growkit.grow(source, tmp_path / "out", hidden="x2")
