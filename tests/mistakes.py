"""Hundreds of things that people get wrong at the command line, and what they are told.

python -m tests.mistakes

Every mistake is one command in a folder of its own, where ``source`` is a Llama, ``diff`` a
DiffLlama, both with a tokenizer, ``grown`` what ``source`` became, ``text.txt`` a text, ``notes`` a
folder of the user's, and ``wider.yaml`` a recipe. It must be answered by one sentence that says
what is wrong and what would do, with exit code 2, before a second of computing is over, and
nothing may be written. Run by hand, all are tried as processes and timed; the suite takes a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import growkit
from growkit.cli.demo.story import MODEL
from tests.conftest import save_model

MOST_SECONDS = 1.0
"""Of computing, before a mistake is told."""

Change = Callable[[], Any]
"""What is done to the folder before the command, from inside of it."""


@dataclass(frozen=True)
class Mistake:
    """A command, and what its answer must hold.

    Attributes:
        command: as it is typed.
        named: words of the answer: what is wrong, and what would do.
        before: makes the folder in which it is a mistake.
    """

    command: str
    named: tuple[str, ...]
    before: Change | None = None

    def __str__(self) -> str:
        return f"growkit {self.command}"


GROW, CONVERT = "grow source out --hidden x2", "convert diff out --to"


def config(**changes: Any) -> Change:
    """Keys of the config that are otherwise; those that are None are taken out."""

    def change() -> None:
        file = Path("source/config.json")
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Other tensors in the file."""

    def changed() -> None:
        file = Path("source/model.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file({name: each.contiguous() for name, each in tensors.items()}, file)

    return changed


def write(name: str, content: str | bytes) -> Change:
    """A file with other contents; its folder is made."""
    data = content.encode() if isinstance(content, str) else content

    def change() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)

    return change


def instead(name: str, content: str | bytes = b"\x00" * 64) -> Change:
    """Another file in the place of the weights."""

    def change() -> None:
        Path("source/model.safetensors").unlink()
        write(f"source/{name}", content)()

    return change


def without(name: str) -> Change:
    """A file is missing."""
    return lambda: Path(name).unlink()


def part(name: str, size: int) -> Change:
    """A file of which only the beginning came."""
    return lambda: Path(name).write_bytes(Path(name).read_bytes()[:size])


def unread() -> None:
    """A model without a tokenizer."""
    for file in Path("source").glob("tokenizer*"):
        file.unlink()


def sharded() -> None:
    """A model of several files, one of which is missing."""
    tensors = sorted(load_file("source/model.safetensors").items())
    half = len(tensors) // 2
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index: dict[str, str] = {}
    for name, held in zip(names, (tensors[:half], tensors[half:]), strict=True):
        save_file(dict(held), f"source/{name}", {"format": "pt"})
        index |= dict.fromkeys(dict(held), name)
    Path("source/model.safetensors").unlink()
    Path("source/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    Path("source", names[1]).unlink()


class Bomb:
    """A pickle that runs something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


def pickled() -> None:
    """Weights that are code."""
    torch.save({"weight": Bomb()}, "source/pytorch_model.bin")
    Path("source/model.safetensors").unlink()


def quantised(tensors: dict[str, torch.Tensor]) -> None:
    """A projection as GPTQ stores it."""
    name = "model.layers.0.mlp.up_proj"
    weight = tensors.pop(f"{name}.weight")
    tensors[f"{name}.qweight"] = torch.zeros(weight.shape[1] // 8 or 1, weight.shape[0]).int()
    tensors[f"{name}.scales"] = torch.ones(1, weight.shape[0])


def recipe(text: str) -> Change:
    """Another recipe."""
    return write("wider.yaml", text)


STEPS = "steps:\n  - grow: hypercloning\n    ffn: x2\n"
MAPPING = "steps: {grow: hypercloning, ffn: x2}\n"
WHOLE = f"source: source\n{STEPS}output: out\n"

FOLDERS = [
    Mistake("grow sorce out --hidden x2", ("sorce", "not a folder", "config.json")),
    Mistake("inspect nowhere", ("nowhere", "not a folder")),
    Mistake("grow source/config.json out --hidden x2", ("source/config.json", "folder")),
    Mistake("inspect source/model.safetensors", ("model.safetensors", "folder")),
    Mistake("grow out source --hidden x2", ("out is not a folder",)),
    Mistake("inspect notes", ("notes/config.json", "model folder")),
    Mistake("inspect .", ("config.json", "give one of the folders")),
    Mistake("inspect ''", ("no name", "folder")),
    Mistake("grow meta-llama/Llama-3.2-1B out --hidden x2", ("Llama-3.2-1B", "hf download")),
    Mistake("verify meta-llama/Llama-3.2-1B grown", ("Llama-3.2-1B", "hf download")),
    Mistake("inspect https://huggingface.co/o/m", ("huggingface.co", "hf download")),
    Mistake("grow m.gguf out --hidden x2", ("m.gguf", "GGUF"), write("m.gguf", b"GGUF\x03")),
    Mistake("inspect m.safetensors", ("folder",), write("m.safetensors", b"\x08")),
    Mistake("grow source source --hidden x2", ("source", "choose another")),
    Mistake("grow source source/large --hidden x2", ("source/large", "another")),
    Mistake("grow source . --hidden x2", ("choose another",)),
    Mistake("grow source notes --hidden x2", ("notes", "exists")),
    Mistake("grow source notes --hidden x2 --overwrite", ("notes", "another")),
    Mistake("grow source text.txt --hidden x2", ("text.txt", "exists")),
    Mistake("grow source text.txt --hidden x2 --overwrite", ("text.txt", "another")),
    Mistake("grow source grown --hidden x2", ("grown", "--overwrite")),
    Mistake("grow source text.txt/out --hidden x2", ("text.txt",)),
    Mistake("grow source '' --hidden x2", ("no name", "folder")),
    Mistake("verify source nowhere", ("nowhere", "not a folder")),
    Mistake("verify nowhere grown", ("nowhere", "not a folder")),
    Mistake("verify source notes", ("notes/config.json",)),
    Mistake("verify source other", ("vocab_size", "64"), lambda: other_vocabulary()),
    Mistake("demo grown", ("grown", "--overwrite")),
    Mistake("demo text.txt", ("text.txt", "exists")),
]

FILES = [
    Mistake(GROW, ("config.json", "does not exist"), without("source/config.json")),
    Mistake(GROW, ("model.safetensors", "weights"), without("source/model.safetensors")),
    Mistake(GROW, ("truncated", "again"), part("source/model.safetensors", 2000)),
    Mistake(GROW, ("truncated", "again"), part("source/model.safetensors", 0)),
    Mistake(GROW, ("config.json", "JSON", "again"), part("source/config.json", 50)),
    Mistake(GROW, ("config.json", "JSON"), write("source/config.json", "")),
    Mistake(GROW, ("config.json", "object"), write("source/config.json", "[]")),
    Mistake(GROW, ("model-00002-of-00002.safetensors", "missing"), sharded),
    Mistake(
        GROW,
        ("points to the weights", "git lfs pull"),
        write("source/model.safetensors", "version https://git-lfs.git"),
    ),
    Mistake(GROW, ("model.safetensors",), write("source/model.safetensors", "<!doctype html>")),
    Mistake(GROW, ("pytorch_model.bin", "safetensors"), pickled),
    Mistake(GROW, ("pytorch_model.bin",), instead("pytorch_model.bin", b"no pickle")),
    Mistake(
        GROW, ("model-q4.gguf", "GGUF", "give the folder"), instead("model-q4.gguf", b"GGUF\x03")
    ),
    Mistake(GROW, ("tf_model.h5", "save_pretrained"), instead("tf_model.h5")),
    Mistake(GROW, ("consolidated", "save_pretrained"), instead("consolidated.00.pth")),
    Mistake(GROW, ("model.pt", "save_pretrained"), instead("model.pt")),
    Mistake(GROW, ("weights.safetensors", "model.safetensors"), instead("weights.safetensors")),
    Mistake("inspect runs", ("checkpoint-1000",), lambda: trained()),
    Mistake("grow runs out --hidden x2", ("checkpoint-1000",), lambda: trained()),
    Mistake("inspect adapter", ("adapter", "merge"), write("adapter/adapter_config.json", "{}")),
    Mistake(GROW, ("adapter", "merge"), write("source/adapter_config.json", "{}")),
    Mistake(GROW, ("dequantise",), config(quantization_config={"quant_method": "gptq"})),
    Mistake(GROW, ("up_proj", "quantised", "dequantise"), weights(quantised)),
    Mistake(GROW, ("bert", "known are"), config(model_type="bert")),
    Mistake(GROW, ("lama", "llama"), config(model_type="lama")),
    Mistake(GROW, ("model_type",), config(model_type=None)),
    Mistake(GROW, ("config.json", "2048"), config(hidden_size=2048)),
    Mistake(GROW, ("hidden_size", "whole number"), config(hidden_size="16")),
    Mistake(GROW, ("num_hidden_layers",), config(num_hidden_layers=0)),
    Mistake(GROW, ("layers.2",), config(num_hidden_layers=3)),
    Mistake(GROW, ("norm", "missing"), weights(lambda t: t.pop("model.norm.weight"))),
    Mistake(GROW, ("extra",), weights(lambda t: t.update(extra=torch.ones(3)))),
]

SIZES = [
    Mistake("grow source out", ("--hidden", "x2")),
    Mistake("grow source out --hidden 2", ("16", "x2")),
    Mistake("grow source out --hidden 24", ("powers of four", "32", "--promise bounded")),
    Mistake("grow source out --hidden 8", ("8", "16")),
    Mistake("grow source out --hidden 16", ("nothing would grow", "x2")),
    Mistake("grow source out --hidden x1", ("x2",)),
    Mistake("grow source out --hidden x0", ("x0", "x2")),
    Mistake("grow source out --hidden -x2", ("-x2", "x2")),
    Mistake("grow source out --hidden 2x", ("2x", "x2")),
    Mistake("grow source out --hidden x2.5", ("hidden can grow by", "32 or 48")),
    Mistake("grow source out --hidden 32.0", ("32.0", "x2")),
    Mistake("grow source out --hidden two", ("two", "x2")),
    Mistake("grow source out --hidden ''", ("hidden", "x2")),
    Mistake("grow source out --hidden 2k", ("2k", "x2")),
    Mistake("grow source out --hidden 200%", ("200%", "x2")),
    Mistake("grow source out --hidden x1000000000000", ("1000000000000",)),
    Mistake("grow source out --heads 3", ("3", "4")),
    Mistake(
        "grow source out --hidden 65", ("num_attention_heads", "choose hidden 64 or hidden 68")
    ),
    Mistake("grow source out --heads x2 --kv-heads x3", ("num_key_value_heads", "choose heads 16")),
    Mistake("grow source out --kv-heads 5", ("5", "num_attention_heads 4")),
    Mistake("grow source out --ffn 23", ("23", "24 or more")),
    Mistake("grow source out --hidden x2 --snr-db 3", ("snr_db", "4.78")),
    Mistake("grow source out --hidden x2 --snr-db loud", ("snr_db", "loud")),
    Mistake("grow source out --hidden x2 --symmetry brake", ("brake", "break")),
    Mistake("grow source out --hidden x2 --method hypercloing", ("hypercloing", "hypercloning")),
    Mistake("grow source out --hidden x2 --method diff-v2", ("diff-v2", "convert")),
    Mistake(
        "grow source out --hidden x2 --method group-diff", ("group-diff", "Llama", "another method")
    ),
    Mistake("grow source out --signal-heads x2", ("signal_heads", "heads")),
    Mistake("grow diff out --method group-diff --signal-heads 3", ("3", "signal")),
    Mistake("grow diff out --method group-diff --heads x2", ("heads", "signal")),
    Mistake("grow diff out --method group-diff --signal-heads x3 --noise-heads x2", ("noise",)),
    Mistake("demo --hidden 3", ("3", "128")),
    Mistake("demo --signal-heads 2.5", ("2.5", "x2")),
]

VALUES = [
    Mistake(f"{GROW} --dtype fp32", ("fp32", "float32")),
    Mistake(f"{GROW} --dtype bf16", ("bf16", "bfloat16")),
    Mistake(f"{GROW} --dtype float8_e4m3fn", ("float8_e4m3fn", "bfloat16")),
    Mistake(f"{GROW} --dtype int8", ("int8", "float32")),
    Mistake(f"{GROW} --shard-size 5", ("5", "5GB")),
    Mistake(f"{GROW} --shard-size 0GB", ("0GB", "5GB")),
    Mistake(f"{GROW} --shard-size 5gigs", ("5gigs", "5GB")),
    Mistake(f"{GROW} --shard-size -1GB", ("-1GB", "5GB")),
    Mistake(f"{GROW} --seed -1", ("seed", "-1")),
    Mistake(f"{GROW} --prompts 0", ("0 prompts", "at least 1")),
    Mistake(f"{GROW} --length 1", ("1 token", "2 tokens")),
    Mistake(f"{GROW} --device gpu", ("gpu", "cuda")),
    Mistake(f"{GROW} --device cuda:0", ("cuda:0", "cuda")),
    Mistake(f"{GROW} --device mps", ("mps", "cpu")),
    Mistake(f"{GROW} --device cuda", ("cuda", "--device cpu")),
    Mistake("verify source grown --device cuda", ("cuda", "--device cpu")),
    Mistake(f"{GROW} --text txet.txt", ("txet.txt", "no such file")),
    Mistake("verify source grown --text txet.txt", ("txet.txt", "no such file")),
    Mistake(f"{GROW} --text notes", ("notes", "text")),
    Mistake(f"{GROW} --text empty.txt", ("empty.txt", "text"), write("empty.txt", "")),
    Mistake(f"{GROW} --text blank.txt", ("blank.txt", "text"), write("blank.txt", " \n\n ")),
    Mistake(f"{GROW} --text a.pdf", ("a.pdf", "UTF-8"), write("a.pdf", b"%PDF\xff\xfe")),
    Mistake(f"{GROW} --text text.txt", ("tokenizer", "--text"), unread),
    Mistake(f"{GROW} --max-kl 0", ("max_kl", "0.01")),
    Mistake(f"{GROW} --max-kl nan", ("max_kl", "0.01")),
    Mistake(f"{GROW} --max-kl 0.1 --no-verify", ("--max-kl", "proof")),
    Mistake(f"{GROW} --report proof.pdf", ("proof.pdf", ".html")),
    Mistake(f"{GROW} --report reports/proof.html", ("reports", "folder")),
    Mistake(f"{GROW} --report out/proof.html", ("out",)),
    Mistake(f"{GROW} --report source/proof.html", ("source", "elsewhere")),
    Mistake(f"{GROW} --report notes", ("notes", ".html")),
    Mistake(f"{GROW} --report own.html", ("own.html", "another"), write("own.html", "<html>")),
    Mistake(f"{GROW} --report proof.html --no-verify", ("--report", "proof")),
    Mistake("verify source grown --report grown/proof.html", ("grown", "elsewhere")),
    Mistake("verify source grown --report proof.txt", ("proof.txt", ".html")),
    Mistake(f"{GROW} --base-model Llama", ("Llama", "ORG/NAME")),
    Mistake(f"{GROW} --base-model ./models/llama", ("./models/llama", "ORG/NAME")),
]

CONVERSIONS = [
    Mistake("convert source out --to dif-v2", ("dif-v2", "diff-v2")),
    Mistake("convert source out --to differential", ("differential", "diff")),
    Mistake("convert source out --to hypercloning", ("hypercloning", "grow")),
    Mistake("convert source out --to shared-diff --rank 2", ("shared-diff", "no noise heads")),
    Mistake("convert source out --to dint", ("--to diff,", "--to dint")),
    Mistake(f"{CONVERT} shared-diff --rank 0", ("rank", "0")),
    Mistake(f"{CONVERT} shared-diff --rank 4096", ("rank", "4096", "choose at most")),
    Mistake(f"{CONVERT} shared-diff --rank eight", ("rank", "eight")),
    Mistake(f"{CONVERT} shared-diff --rank 2,2,2", ("rank", "3", "2 layers")),
    Mistake(f"{CONVERT} shared-diff --rank 50%", ("rank", "50%")),
    Mistake(f"{CONVERT} shared-diff", ("rank",)),
    Mistake(f"{CONVERT} diff-v2 --rank 4", ("rank", "diff-v2")),
    Mistake(f"{CONVERT} shared-diff --rank auto --energy 99", ("energy", "99")),
    Mistake(f"{CONVERT} shared-diff --rank auto --tolerance -1", ("tolerance", "-1")),
    Mistake(f"{CONVERT} shared-diff --rank 2 --energy 0.9", ("energy", "auto")),
    Mistake(f"{CONVERT} shared-diff --rank 2 --calibration no.txt", ("no.txt", "no such file")),
    Mistake(
        f"{CONVERT} shared-diff --rank 2 --calibration text.txt --shrinkage 3", ("shrinkage", "3")
    ),
    Mistake(f"{CONVERT} shared-diff --rank 2 --shrinkage 0.5", ("shrinkage", "calibration")),
    Mistake(f"{CONVERT} shared-diff --rank 2 --scope heads", ("heads", "head")),
    Mistake(f"{CONVERT} dint --gamma gate", ("gate", "gated")),
    Mistake(f"{CONVERT} dint --integral colum", ("colum", "column_mean")),
    Mistake("convert source out --to diff --head-norm rms", ("rms", "affine")),
    Mistake(f"{CONVERT} llama", ("Llama", "num_noise_heads", "another layout")),
]

RECIPES = [
    Mistake("run widr.yaml", ("widr.yaml", "no file")),
    Mistake("run notes", ("notes",)),
    Mistake("run source", ("source", "recipe")),
    Mistake("run source/config.json", ("config.json", "recipe")),
    Mistake("run cli.py", ("cli.py",), write("cli.py", "import os\n\nos.getcwd()\n")),
    Mistake("run source/model.safetensors", ("model.safetensors",)),
    Mistake("run wider.yaml", ("wider.yaml", "mapping"), recipe("")),
    Mistake("run wider.yaml", ("wider.yaml", "mapping"), recipe("- grow: hypercloning\n")),
    Mistake("run wider.yaml", ("YAML", "tab"), recipe(WHOLE.replace("    ffn", "\tffn"))),
    Mistake("run wider.yaml", ("wider.yaml",), recipe(WHOLE.replace("    ffn", "  ffn"))),
    Mistake(
        "run wider.yaml", ("wider.yaml",), recipe(WHOLE.replace("  -", "-  ").replace(":", ""))
    ),
    Mistake("run wider.yaml", ("source", "twice"), recipe(f"source: source\n{WHOLE}")),
    Mistake("run wider.yaml", ("soruce", "source"), recipe(WHOLE.replace("source:", "soruce:"))),
    Mistake("run wider.yaml", ("no source",), recipe(f"{STEPS}output: out\n")),
    Mistake("run wider.yaml", ("no output",), recipe(f"source: source\n{STEPS}")),
    Mistake("run wider.yaml", ("no steps",), recipe("source: source\noutput: out\n")),
    Mistake(
        "run wider.yaml",
        ("steps", "list"),
        recipe(
            WHOLE.replace("- grow", "grow").replace("    f", "    f")[:0]
            + "source: source\nsteps: {grow: hypercloning}\noutput: out\n"
        ),
    ),
    Mistake("run wider.yaml", ("grow", "convert"), recipe(WHOLE.replace("grow:", "method:"))),
    Mistake("run wider.yaml", ("hypercloning",), recipe(WHOLE.replace("cloning", "clonig"))),
    Mistake("run wider.yaml", ("fnn", "ffn"), recipe(WHOLE.replace("ffn", "fnn"))),
    Mistake("run wider.yaml", ("ffn", "x2"), recipe(WHOLE.replace("x2", "[2]"))),
    Mistake("run wider.yaml", ("ffn", "x2"), recipe(WHOLE.replace("x2", "2.5"))),
    Mistake("run wider.yaml", ("ffn", "x2"), recipe(WHOLE.replace("x2", "true"))),
    Mistake("run wider.yaml", ("seed", "whole number"), recipe(f"{WHOLE}seed: zero\n")),
    Mistake("run wider.yaml", ("verify", "true"), recipe(f"{WHOLE}verify: maybe\n")),
    Mistake("run wider.yaml", ("prompt", "prompts"), recipe(f"{WHOLE}verify: {{prompt: 8}}\n")),
    Mistake("run wider.yaml", ("length",), recipe(f"{WHOLE}verify: {{length: long}}\n")),
    Mistake("run wider.yaml", ("device",), recipe(f"{WHOLE}verify: {{device: gpu}}\n")),
    Mistake("run wider.yaml", ("no.txt",), recipe(f"{WHOLE}verify: {{text: no.txt}}\n")),
    Mistake("run wider.yaml", ("dtype", "text"), recipe(f"{WHOLE}dtype: 32\n")),
    Mistake("run wider.yaml", ("fp8", "float32"), recipe(f"{WHOLE}dtype: fp8\n")),
    Mistake("run wider.yaml", ("shard_size",), recipe(f"{WHOLE}shard_size: 5\n")),
    Mistake("run wider.yaml --source nowhere", ("nowhere", "folder")),
    Mistake("run wider.yaml --output source", ("source", "another")),
    Mistake(
        "run wider.yaml", ("nowhere", "--source"), recipe(WHOLE.replace(" source", " nowhere"))
    ),
    Mistake("run wider.yaml --max-kl 0.1", ("--max-kl",), recipe(f"{WHOLE}verify: false\n")),
    Mistake("run grown/growkit.json", ("grown", "another output")),
    Mistake(
        "run grown/growkit.json --output b",
        ("growkit.json", "again"),
        part("grown/growkit.json", 99),
    ),
    Mistake("recipes show hypercloning-2x", ("hypercloning-2x", "hypercloning-x2")),
    Mistake("recipes copy wider-mpl", ("wider-mpl", "wider-mlp")),
    Mistake("recipes copy wider-mlp nowhere", ("nowhere", "folder")),
    Mistake("recipes copy wider-mlp text.txt", ("text.txt",)),
    Mistake(
        "recipes copy wider-mlp", ("wider-mlp.yaml", "exists"), write("wider-mlp.yaml", "mine")
    ),
]

DEPTH = "grow source out --method depth"
UPCYCLE = "grow source out --method upcycle"

METHODS = [
    Mistake(DEPTH, ("layers", "x2")),
    Mistake(f"{DEPTH} --layers 1", ("layers 1", "2", "x2")),
    Mistake(f"{DEPTH} --layers 2", ("layers 2", "x2")),
    Mistake(f"{DEPTH} --layers 4 --place top", ("top", "even|end")),
    Mistake(f"{DEPTH} --layers 4 --blocks zero", ("zero", "identity")),
    Mistake(f"{DEPTH} --layers 4 --symmetry break", ("symmetry", "hypercloning")),
    Mistake(f"{DEPTH} --hidden x2", ("hidden", "layers", "hypercloning")),
    Mistake("grow source out --layers 4", ("layers", "depth")),
    Mistake("grow source out --depth 4", ("--depth", "--method depth")),
    Mistake("grow source out --method dept --layers 4", ("dept", "depth")),
    Mistake("grow source out --method vocabulary --vocab 300", ("vocab", "hypercloning")),
    Mistake("grow source out --vocab 100", ("100", "256")),
    Mistake("grow source out --vocab 256", ("nothing would grow", "x2")),
    Mistake(UPCYCLE, ("experts", "how many")),
    Mistake(f"{UPCYCLE} --experts 0", ("experts", "'0'", "x2")),
    Mistake(f"{UPCYCLE} --experts 4 --top-k 5", ("top_k 5", "at most 4")),
    Mistake(f"{UPCYCLE} --experts 4 --granularity 7", ("granularity 7", "power of two")),
    Mistake("grow source out --method upcycling --experts 4", ("upcycling", "upcycle")),
    Mistake("grow source out --method experts --experts 8", ("no experts", "upcycle")),
    Mistake("grow diff out --method upcycle --experts 4", ("DiffLlama", "llama")),
    Mistake("grow source out --experts 4", ("experts", "upcycle")),
    Mistake("grow source out --untie", ("untie", "already")),
    Mistake("grow source out --untie yes", ("yes",)),
    Mistake("grow source out --hidden 24 --promise bound", ("bound", "bounded")),
    Mistake(f"{GROW} --promise exakt", ("exakt", "exact")),
    Mistake(f"{GROW} --rank 4", ("--rank", "convert")),
    Mistake(f"{GROW} --dryrun", ("--dryrun", "--dry-run")),
    Mistake("convert diff out --to diff --rank 4", ("rank", "shared-diff")),
    Mistake("convert source out --method dint", ("--method", "grow")),
    Mistake("convert source out --dint", ("--dint", "--to dint")),
    Mistake("verify source grown --dry-run", ("--dry-run", "grow")),
    Mistake("verify source grown --max-kl lots", ("--max-kl", "number")),
    Mistake("families lama", ("lama", "llama")),
    Mistake("families --jsn", ("--jsn", "--json")),
    Mistake("prob source", ("prob", "probe")),
    Mistake("probe source", ("--candidates", "--help")),
    Mistake("demo out --text text.txt", ("--text", "grow")),
    Mistake("run grown --output out --hidden x2", ("--hidden", "grow")),
    Mistake("run grown --output source", ("source", "another")),
    Mistake("run grown --output out --source nowhere", ("nowhere", "folder")),
    Mistake("run grown --output out", ("source", "--source"), lambda: shutil.rmtree("source")),
    Mistake("run grown/README.md --output out", ("README.md", "YAML")),
    Mistake("run depth-llama --source source", ("depth-llama", "depth-llama-pro")),
    Mistake("recipes run wider-mlp", ("run", "show")),
]

MISTAKES = [*FOLDERS, *FILES, *SIZES, *VALUES, *CONVERSIONS, *RECIPES, *METHODS]


def other_vocabulary() -> None:
    """A model of other tokens."""
    save_model(Path("other"), "llama", vocab_size=64)


def trained() -> None:
    """What a Trainer leaves."""
    for step in (500, 1000):
        shutil.copytree("source", f"runs/checkpoint-{step}")


def make_place(folder: Path) -> None:
    """The folder in which mistakes are made."""
    sizes = {"vocab_size": 256, "intermediate_size": 24}
    save_model(folder / "source", "llama", **sizes)
    save_model(folder / "diff", "diffllama", head_dim=8, **sizes)
    for kind in ("source", "diff"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, folder / kind)
    (folder / "text.txt").write_text("a text of a few words, again and again. " * 40)
    (folder / "notes").mkdir()
    (folder / "notes" / "todo.txt").write_text("mine")
    (folder / "wider.yaml").write_text(WHOLE)
    with chdir(folder):
        growkit.grow("source", "grown", ffn="x2", verify=False)


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """As ``contextlib.chdir``, which Python 3.10 does not have."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    found = sorted(folder.rglob("*"))
    return {str(f.relative_to(folder)): f.read_bytes() if f.is_file() else None for f in found}


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    stdout: str
    stderr: str
    seconds: float = 0.0


def faults(mistake: Mistake, folder: Path, ask: Callable[[list[str]], Answer]) -> list[str]:
    """What is wrong with how a mistake is answered.

    Args:
        mistake: it.
        folder: as ``make_place`` makes it, to be used up.
        ask: runs a command in the present folder.
    """
    with chdir(folder):
        if mistake.before:
            mistake.before()
        before = contents(folder)
        answer = ask(shlex.split(mistake.command))
        after = contents(folder)
    return list(_faults(mistake, answer, before == after))


def _faults(mistake: Mistake, answer: Answer, untouched: bool) -> Iterator[str]:
    lines = answer.stderr.splitlines()
    if answer.code != 2:
        yield f"exit code {answer.code}"
    if answer.stdout:
        yield f"on stdout: {answer.stdout[:200]}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        yield f"no sentence: {answer.stderr[:400]}"
    yield from (f"does not name {word}" for word in mistake.named if word not in answer.stderr)
    if not untouched:
        yield "something was written"
    if answer.seconds > MOST_SECONDS:
        yield f"took {answer.seconds:.2f} s"


def in_a_process(words: list[str]) -> Answer:
    """Run a command as people do; seconds are those of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "growkit", *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Answer(done.returncode, done.stdout, done.stderr, seconds)


def main() -> int:
    """Try all."""
    parser = argparse.ArgumentParser(description="Try all mistakes, each as a process.")
    parser.add_argument("--only", default="", help="those whose command holds this")
    parser.add_argument("--list", action="store_true", help="print every answer")
    asked = parser.parse_args()
    chosen = [each for each in MISTAKES if asked.only in each.command]
    wrong, times = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        make_place(Path(scratch, "place"))
        for number, mistake in enumerate(chosen):
            folder = Path(scratch, f"try-{number}")
            shutil.copytree(Path(scratch, "place"), folder)
            told: list[Answer] = []

            def ask(words: list[str], told: list[Answer] = told) -> Answer:
                told.append(in_a_process(words))
                return told[-1]

            found = faults(mistake, folder, ask)
            times.append((told[0].seconds, str(mistake)))
            if found or asked.list:
                say(f"{mistake}\n    {told[0].stderr.strip()[:600]}")
            for fault in found:
                say(f"  ! {fault}")
            wrong += bool(found)
            shutil.rmtree(folder)
    slowest, command = max(times)
    say(f"{len(chosen)} mistakes, {wrong} not answered as they should be")
    say(f"slowest: {slowest:.2f} s of computing, {command}")
    return bool(wrong)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
