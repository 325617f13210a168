"""What users get wrong: one clear sentence, exit code 2, nothing lost and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from growkit.checkpoint import writing
from growkit.checkpoint.tensors import TensorInfo
from growkit.cli import demo
from growkit.cli.app import app
from tests.conftest import folder_bytes, save_model

Make = Callable[..., Path]


def refused(folder: Path, *arguments: str) -> str:
    """Run ``growkit grow SRC OUT …`` and return its sentence, after checking the manners.

    The source keeps its bytes, and beside it there is nothing new.
    """
    before = folder_bytes(folder.parent)
    result = CliRunner().invoke(app, ["grow", str(folder), *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert folder_bytes(folder.parent) == before
    return lines[0]


def heed_interrupts() -> None:
    """As in a terminal, also where the tests run in the background, with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "place" / "source", "llama")


@pytest.fixture
def out(source: Path) -> Path:
    return source.parent / "out"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


def test_missing_shard(source: Path, out: Path) -> None:
    shutil.rmtree(source)
    save_model(source, "llama", shard_size="4KB")
    victim = sorted(source.glob("model-*.safetensors"))[1]
    victim.unlink()
    sentence = refused(source, str(out), "--hidden", "x2")
    assert victim.name in sentence
    assert "missing" in sentence


def test_shard_of_another_model(source: Path, out: Path) -> None:
    shutil.rmtree(source)
    save_model(source, "llama", shard_size="4KB")
    shards = sorted(source.glob("model-*.safetensors"))
    shutil.copyfile(shards[0], shards[1])
    assert shards[1].name in refused(source, str(out), "--hidden", "x2")


@pytest.mark.parametrize("keep", [0, 4, 100, -7])
def test_truncated_file(keep: int, source: Path, out: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    sentence = refused(source, str(out), "--hidden", "x2")
    assert str(file) in sentence
    assert "truncated" in sentence


@pytest.mark.parametrize("content", [b"", b"\x80\x02nonsense", b"PK\x03\x04 half a zip"])
def test_pickle_that_is_none(content: bytes, source: Path, out: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin" in refused(source, str(out), "--hidden", "x2")


def test_pickle_with_code(source: Path, out: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch " + str(source / "exploded"),)

    (source / "model.safetensors").unlink()
    torch.save({"weight": Bomb()}, source / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(source, str(out), "--hidden", "x2")
    assert not (source / "exploded").exists()


def test_missing_tensor(source: Path, out: Path) -> None:
    edit_weights(source, lambda tensors: tensors.pop(UP))
    sentence = refused(source, str(out), "--hidden", "x2")
    assert UP in sentence
    assert "[24, 16]" in sentence


def test_wrong_shape(source: Path, out: Path) -> None:
    edit_weights(source, lambda tensors: tensors.update({UP: torch.zeros(24, 15)}))
    sentence = refused(source, str(out), "--hidden", "x2")
    assert UP in sentence
    assert "[24, 15]" in sentence
    assert "[24, 16]" in sentence


def test_unknown_tensor(source: Path, out: Path) -> None:
    edit_weights(source, lambda tensors: tensors.update({"model.extra": torch.zeros(3)}))
    assert "model.extra" in refused(source, str(out), "--hidden", "x2")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_no_numbers(
    value: float, dtype: torch.dtype, source: Path, out: Path
) -> None:
    shutil.rmtree(source)
    save_model(source, "llama", dtype=dtype)
    edit_weights(source, lambda tensors: tensors[UP][3].fill_(value))
    sentence = refused(source, str(out), "--hidden", "x2", "--no-verify")
    assert UP in sentence
    assert "NaN" in sentence


def test_large_weights_are_numbers(source: Path, out: Path) -> None:
    """The quick look at a sum overflows here; the slow look must clear them."""
    shutil.rmtree(source)
    save_model(source, "llama", dtype=torch.float16)
    edit_weights(source, lambda tensors: tensors[UP].fill_(60000.0))
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_integer_weights(source: Path, out: Path) -> None:
    edit_weights(source, lambda t: t.update({UP: torch.zeros(24, 16, dtype=torch.int8)}))
    sentence = refused(source, str(out), "--hidden", "x2")
    assert UP in sentence
    assert "I8" in sentence


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt9"}, "gpt9"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 2.5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"attention_bias": True}, "bias"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
    ],
    ids=str,
)
def test_config_that_does_not_fit(
    changes: dict[str, Any], named: str, source: Path, out: Path
) -> None:
    edit_config(source, **changes)
    assert named in refused(source, str(out), "--hidden", "x2")


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_config_that_is_no_config(content: str, source: Path, out: Path) -> None:
    (source / "config.json").write_text(content)
    assert "config.json" in refused(source, str(out), "--hidden", "x2")


def test_no_config_and_no_weights(source: Path, out: Path) -> None:
    (source / "model.safetensors").unlink()
    assert "no weights" in refused(source, str(out), "--hidden", "x2")
    (source / "config.json").unlink()
    assert "config.json" in refused(source, str(out), "--hidden", "x2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--hidden"),
        (["--hidden", "x1"], "--hidden"),
        (["--hidden", "x0"], "x0"),
        (["--hidden", "x-2"], "x-2"),
        (["--hidden", "x1.5"], "hidden"),
        (["--hidden", "twice"], "twice"),
        (["--hidden", "20"], "num_attention_heads 5"),
        (["--hidden", "20", "--heads", "4"], "--promise bounded"),
        (["--hidden", "8"], "choose 16 or more, or x8"),
        (["--hidden", "x2", "--kv-heads", "x3"], "num_key_value_heads"),
        (["--hidden", "x2", "--heads", "x3"], "num_attention_heads"),
        (["--hidden", "x2", "--method", "magic"], "magic"),
        (["--hidden", "x2", "--symmetry", "shatter"], "shatter"),
        (["--hidden", "x2", "--snr-db", "1"], "4.78"),
        (["--hidden", "x2", "--snr-db", "nan"], "nan"),
        (["--hidden", "x2", "--dtype", "float31"], "float31"),
        (["--hidden", "x2", "--shard-size", "big"], "big"),
        (["--hidden", "x2", "--device", "tpu"], "tpu"),
        (["--hidden", "x2", "--seed", str(2**64)], str(2**64)),
        (["--hidden", "9" * 5000], "hidden"),
        (["--hidden", "x2", "--snr-db", "inf"], "inf"),
        (["--hidden", "x2", "--prompts", "0"], "prompts"),
        (["--hidden", "x2", "--length", "1"], "tokens"),
        (["--hidden", "x2", "--text", "/nowhere.txt"], "/nowhere.txt"),
    ],
    ids=str,
)
def test_impossible_wishes(arguments: list[str], named: str, source: Path, out: Path) -> None:
    assert named in refused(source, str(out), *arguments)


def test_source_that_is_not_there(source: Path, out: Path) -> None:
    assert "nowhere" in refused(source.parent / "nowhere", str(out), "--hidden", "x2")


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_output_that_is_there(what: str, overwrite: list[str], source: Path, out: Path) -> None:
    if what == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("the only copy")
    elif what == "file":
        out.write_text("the only copy")
    else:
        out.symlink_to(out.parent / "nowhere")
    assert str(out) in refused(source, str(out), "--hidden", "x2", *overwrite)


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_output_and_source_overlap(place: str, source: Path) -> None:
    sentence = refused(source, str(source.parent / place), "--hidden", "x2", "--overwrite")
    assert "overlap" in sentence


@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_output_that_cannot_be_written(place: str, source: Path) -> None:
    (source.parent / "file").write_text("a file, not a folder")
    assert place in refused(source, str(source.parent / place), "--hidden", "x2")


def test_missing_parents_are_made_and_tidied_up(source: Path) -> None:
    deep = source.parent / "a" / "b" / "out"
    arguments = ["grow", str(source), str(deep), "--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (deep / "growkit.json").exists()
    edit_weights(source, lambda tensors: tensors[UP].fill_(float("nan")))
    refused(source, str(source.parent / "c" / "d" / "out"), "--hidden", "x2")
    assert not (source.parent / "c").exists()


def test_disk_without_room(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    sentence = refused(source, str(out), "--hidden", "x2")
    assert "MB" in sentence
    assert str(out.parent) in sentence


def test_disk_that_fills_up(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal written
        if written > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += len(data)
        return len(data)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    assert "filled up" in refused(source, str(out), "--hidden", "x2")


def test_overwriting_keeps_the_old_output_until_the_new_one_is_proved(
    source: Path, out: Path
) -> None:
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    first = folder_bytes(out)
    weights = (source / "model.safetensors").read_bytes()
    edit_weights(source, lambda tensors: tensors[UP].fill_(float("nan")))
    refused(source, str(out), "--hidden", "x2", "--overwrite")
    assert folder_bytes(out) == first
    (source / "model.safetensors").write_bytes(weights)
    assert CliRunner().invoke(app, [*arguments, "--overwrite", "--seed", "1"]).exit_code == 0
    assert folder_bytes(out) != first
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


SLOWLY = """
import os, runpy, sys, threading, time
seconds, pwrite = float(sys.argv.pop(1)), os.pwrite
def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(seconds)
    return pwrite(*arguments)
os.pwrite = slow
runpy.run_module("growkit", run_name="__main__")
"""
"""growkit on a disk that takes so many seconds for every tensor."""


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_interrupted_in_the_middle(signum: int, code: int, tmp_path: Path) -> None:
    """Stopped as soon as the temporary folder shows that weights are being written."""
    place = tmp_path / "place"
    source = save_model(place / "source", "llama")
    before = folder_bytes(place)
    arguments = ["grow", str(source), str(place / "out"), "--hidden", "x4", "--no-verify"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "0.3", *arguments],
        preexec_fn=heed_interrupts,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(place.glob(".out.*/**/*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert folder_bytes(place) == before
    assert [path.name for path in place.iterdir()] == ["source"]


def test_nohup_is_respected(tmp_path: Path) -> None:
    """A hangup that the parent chose to ignore does not end the work."""
    place = tmp_path / "place"
    source = save_model(place / "source", "llama")
    arguments = ["grow", str(source), str(place / "out"), "--hidden", "x2", "--no-verify"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "0.2", *arguments],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        stdout=subprocess.DEVNULL,
    )
    while not any(place.glob(".out.*/**/*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert (place / "out" / "growkit.json").exists()


def test_stopped_work_reads_nothing_more(tmp_path: Path) -> None:
    """Hundreds of tensors may be waiting when someone interrupts; none of them is begun."""
    stop = Event()
    stop.set()

    class Unread:
        tensors: ClassVar[dict[str, TensorInfo]] = {"a": TensorInfo((1,), "F32")}

        def blocks(self, name: str) -> Iterator[torch.Tensor]:
            pytest.fail("read after the stop")

    file = tmp_path / "never-made"
    writing._write_tensor(Unread(), "a", file, 0, lambda count: None, stop)  # type: ignore[arg-type]


def test_interrupted_twice(tmp_path: Path) -> None:
    """An impatient second Ctrl-C does not disturb the cleaning up."""
    place = tmp_path / "place"
    source = save_model(place / "source", "llama")
    arguments = ["grow", str(source), str(place / "out"), "--hidden", "x4", "--no-verify"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "0.3", *arguments], preexec_fn=heed_interrupts
    )
    while not any(place.glob(".out.*/**/*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert process.wait(60) == 130
    assert [path.name for path in place.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "1e-6"},
        {"hidden_act": "foo"},
        {"hidden_act": None},
        {"max_position_embeddings": "x"},
        {"max_position_embeddings": 1},
        {"max_position_embeddings": -5},
        {"rope_parameters": []},
        {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
        {"rope_theta": "x", "rope_parameters": None},
        {"pad_token_id": 999},
        {"model_type": ["llama"]},
        {"num_hidden_layers": 10**12},
    ],
    ids=str,
)
def test_configs_that_transformers_refuses(
    changes: dict[str, Any], source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before anything is written."""
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: pytest.fail("too late"))
    edit_config(source, **changes)
    assert str(source) in refused(source, str(out), "--hidden", "x2")


@pytest.mark.parametrize(
    "arguments", [["--text", "/nowhere.txt"], ["--device", "cuda"], ["--text", __file__]], ids=str
)
def test_what_the_proof_would_refuse_is_refused_before_writing(
    arguments: list[str], source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: pytest.fail("too late"))
    refused(source, str(out), "--hidden", "x2", *arguments)


def test_code_in_the_folder_is_never_run(source: Path, out: Path) -> None:
    (source / "evil.py").write_text(f"open({str(source / 'ran')!r}, 'w')\nclass T: pass\n")
    (source / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.T", null]}}'
    )
    refused(source, str(out), "--hidden", "x2", "--text", str(Path(__file__)))
    assert not (source / "ran").exists()


def test_a_pointer_to_weights(source: Path, out: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (source / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in refused(source, str(out), "--hidden", "x2")


def test_a_tied_model_that_stores_only_the_head(source: Path, out: Path) -> None:
    edit_config(source, tie_word_embeddings=True)
    edit_weights(source, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "rename lm_head.weight" in refused(source, str(out), "--hidden", "x2")


def test_a_rejected_folder_in_the_way(source: Path, out: Path) -> None:
    (out.parent / "out.rejected").mkdir()
    (out.parent / "out.rejected" / "notes.txt").write_text("mine")
    assert "out.rejected" in refused(source, str(out), "--hidden", "x2")


def change_file(file: Path, text: str, later: float) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    os.utime(file, (later, later))


@pytest.mark.parametrize(
    "changed", ["notes.txt", "model.safetensors", "README.md", "additional_chat_templates/x.jinja"]
)
@pytest.mark.parametrize("seconds", [-3600, 0, 3600])
def test_overwriting_spares_what_users_did(
    changed: str, seconds: int, source: Path, out: Path
) -> None:
    """Whatever was added or changed, at the top or below, whatever its date."""
    change_file(source / "additional_chat_templates" / "x.jinja", "{{ old }}", 1e9)
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    change_file(out / changed, "mine", time.time() + seconds)
    assert str(out) in refused(source, str(out), "--hidden", "x2", "--overwrite")


@pytest.mark.parametrize("content", ["{", "[]", '{"files": null}'])
def test_overwriting_with_a_damaged_manifest(content: str, source: Path, out: Path) -> None:
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (out / "growkit.json").write_text(content)
    assert str(out) in refused(source, str(out), "--hidden", "x2", "--overwrite")


@pytest.mark.parametrize("inside", [True, False])
def test_overwriting_from_where_one_stands(
    inside: bool, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT through a path that leads through OUT, and OUT as the current folder."""
    arguments = ["--hidden", "x2", "--no-verify"]
    assert CliRunner().invoke(app, ["grow", str(source), str(out), *arguments]).exit_code == 0
    first = folder_bytes(out)
    monkeypatch.chdir(out)
    again = ["grow", str(source), "." if inside else "../out", *arguments, "--overwrite"]
    assert CliRunner().invoke(app, [*again, "--seed", "1"]).exit_code == 0
    assert folder_bytes(out) != first
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


def test_an_output_that_appears_meanwhile_is_not_replaced(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writing._write_tensor

    def slowly(*arguments: Any) -> None:
        out.mkdir(exist_ok=True)
        write(*arguments)

    monkeypatch.setattr(writing, "_write_tensor", slowly)
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "meanwhile" in result.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]
    assert not any(out.iterdir())


def test_names_are_not_markup(source: Path) -> None:
    out = source.parent / "[red]x[/b]"
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert f"written to {out}" in result.stdout


def test_faults_of_growkit_are_no_broken_promise(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: 1 / 0)
    arguments = ["grow", str(source), str(out), "--hidden", "x2", "--no-verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "internal error" in result.stderr
    assert not out.exists()


def test_debug_shows_the_traceback(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the sentence; and the exit code stays."""
    words = ["grow", str(source), str(out), "--hidden", "x0"]
    plain = CliRunner().invoke(app, words)
    monkeypatch.setenv("GROWKIT_DEBUG", "1")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == plain.exit_code == 2
    assert "Traceback" not in plain.stderr
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith(plain.stderr)


DEMO = Path(demo.__file__).parent / "model"


def refused_pair(source: Path, target: Path, *arguments: str) -> str:
    """Run ``growkit verify SRC OUT …`` and return its sentence; neither folder changes."""
    before = folder_bytes(source), folder_bytes(target)
    result = CliRunner().invoke(app, ["verify", str(source), str(target), *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert (folder_bytes(source), folder_bytes(target)) == before
    return line


@pytest.fixture
def copy(source: Path, out: Path) -> Path:
    return shutil.copytree(source, out)


def test_pairs_of_different_vocabularies(source: Path, out: Path) -> None:
    save_model(out, "llama", vocab_size=30)
    sentence = refused_pair(source, out)
    assert "29" in sentence
    assert "30" in sentence


@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_targets_that_hold_no_numbers(value: float, name: str, source: Path, copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors[name][-1].fill_(value))
    sentence = refused_pair(source, copy)
    assert name in sentence
    assert str(copy) in sentence


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A model that has a tokenizer."""
    return shutil.copytree(DEMO, tmp_path / "reader")


@pytest.mark.parametrize("text", ["", " \n", "<|endoftext|>\n<|endoftext|>", "a"], ids=repr)
def test_texts_that_are_too_short(text: str, reader: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text)
    sentence = refused_pair(reader, reader, "--text", str(file))
    assert str(file) in sentence
    assert "fewer than 2 tokens" in sentence


def test_text_for_a_source_without_tokenizer(source: Path, copy: Path) -> None:
    sentence = refused_pair(source, copy, "--text", __file__)
    assert str(source) in sentence
    assert "no tokenizer" in sentence


def test_a_target_needs_no_tokenizer(reader: Path, tmp_path: Path) -> None:
    """The source's makes the tokens that both are asked with."""
    bare = shutil.copytree(reader, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    quick = ["--text", __file__, "--prompts", "1", "--length", "12"]
    result = CliRunner().invoke(app, ["verify", str(reader), str(bare), *quick])
    assert result.exit_code == 0, result.output


def test_a_gpu_that_is_not_there(source: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in refused_pair(source, copy, "--device", "cuda")


def test_a_family_that_is_not_known(source: Path, copy: Path) -> None:
    edit_config(copy, model_type="nobodys")
    assert str(copy) in refused_pair(source, copy)


def test_a_target_that_is_not_there(source: Path, out: Path) -> None:
    out.mkdir()
    assert "config.json" in refused_pair(source, out)
