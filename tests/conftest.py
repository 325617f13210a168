"""Tiny random models, made by transformers, and the oracle that judges what becomes of them."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from logging import CRITICAL
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

import growkit
from growkit.base import tensors
from growkit.base.progress import Advance
from growkit.cli.commands import app
from growkit.cli.demo import MODEL
from growkit.engine import lending
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_internals import uninitialised
from growkit.model.checkpoint.reading import Checkpoint
from growkit.proof import mode_results

logging.disable_progress_bar()
logging.set_verbosity(CRITICAL)  # which proofs need not set and reset
torch.set_num_threads(1)  # tiny models: a second thread only costs
os.fsync = lambda descriptor: None  # nor does any machine lose power
testing._get_command = cache(get_command)  # made once, as in a process of its own

growkit.register_own_classes()

Make = Callable[..., Path]
"""Of the fixture ``make``."""

KINDS = ("llama", "mistral", "diffllama", "diff_transformer")
TOKENS = 12
CASES = Path(__file__).with_name("cases")
SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "ffn_dim": 24,
    "word_embed_proj_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Of tiny models; a type takes those that its config knows."""


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-13) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are the same."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat, others = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return bool(flat.equal(others))


def listed(file: str, section: str) -> Any:
    """A table of ``tests/cases/FILE.yaml``."""
    return yaml.safe_load((CASES / f"{file}.yaml").read_text("utf-8"))[section]


def edit_config(folder: Path, file: str = "config.json", **changes: Any) -> None:
    with edit_json(folder / file) as config:
        config |= changes


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter a random value: no bias is zero and no norm is one, so faults show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def save_model(
    folder: Path,
    kind: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Save a tiny random model of a type and return its folder."""
    config_class = CONFIG_MAPPING[kind]
    known = {each.name: each.default for each in fields(config_class)}
    sizes = {k: v for k, v in SIZES.items() if k in known or k in config_class.attribute_map}
    if known.get("head_dim"):  # else it follows from the hidden size
        sizes["head_dim"] = 4
    return save_random(folder, config_class(**(sizes | config)), seed, dtype, shard_size)


def save_random(
    folder: Path,
    config: PreTrainedConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
) -> Path:
    """Save a random model of a config and return its folder."""
    torch.manual_seed(seed)
    with uninitialised():
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tensors of more elements than this are large: they are read and cast in parts."""
    elements = 128
    for module in (tensors, lending):
        monkeypatch.setattr(module, "AT_ONCE", elements)
    return elements


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is read of checkpoints: names of tensors, with the number of elements."""
    found: list[tuple[str, int]] = []
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, *part: slice | None) -> torch.Tensor:
        tensor = read(self, name, *part)
        found.append((name, tensor.numel()))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", noted)
    return found


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """``make("llama", hidden_size=32)`` -> the folder of a tiny random model."""
    count = iter(range(10**6))

    def build(kind: str, **options: Any) -> Path:
        return save_model(tmp_path / f"{kind}-{next(count)}", kind, **options)

    return build


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, what it grew into, and what it was converted into with a loss."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8)
    growkit.grow(source, folder / "exact", hidden="x2", verify=False)
    growkit.convert(source, folder / "lossy", "shared-diff", rank=1, verify=False)
    return folder


class Counted:
    """Progress as anybody may show it."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.total: dict[str, int] = {}

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Advance]:
        self.done[title], self.total[title] = 0, total

        def advance(count: int) -> None:
            self.done[title] += count

        yield advance


def load_strict(folder: Path) -> PreTrainedModel:
    """The folder's model in strict float64, all of its weights from the files."""
    with strict_float64():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the fast one has no float64
            output_loading_info=True,
        )
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    return model.eval()


def random_ids(model: PreTrainedModel, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """A prompt of a model's tokens, [1, tokens]."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    return torch.randint(count, (1, tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one prompt, [tokens, vocabulary], in strict float64."""
    with strict_float64(), torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def strict_logits(folder: Path, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """Logits of seeded random tokens, in strict float64."""
    model = load_strict(folder)
    return logits_of(model, random_ids(model, seed, tokens))


def distance(
    expected: torch.Tensor, found: torch.Tensor, mask: torch.Tensor | None = None
) -> float:
    """Largest difference against the root mean square of what is expected, at real tokens."""
    if mask is not None:
        expected, found = expected[mask.bool()], found[mask.bool()]
    return float((expected - found).abs().max() / expected.square().mean().sqrt())


def relative_error(source: Path, target: Path) -> float:
    """How far the logits of the source's tokens are apart."""
    before, after = load_strict(source), load_strict(target)
    ids = random_ids(before)
    expected = logits_of(before, ids)
    return distance(expected, logits_of(after, ids)[:, : expected.shape[1]])


def train_step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    """One step on these tokens in strict float64; gives the loss before it."""
    with strict_float64():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def cli(*words: object) -> Result:
    """The answer of the command line to some words, on a wide terminal."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def refusal(*words: object) -> str:
    """The one sentence with which a command line is refused."""
    done = cli(*words)
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def with_tokenizer(folder: Path) -> Path:
    """The folder with the demo's tokenizer: 256 bytes."""
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def seeded(seed: int) -> random.Random:
    """Random choices that do not change from run to run."""
    return random.Random(seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, not samples")
    parser.addoption("--inputs", type=int, help="how many odd files tests/fuzz makes")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Keep n cases of a test marked ``sampled(n, *ids)``, these and others chosen by its name.

    Before there are tests of them: most of the time that collecting takes is theirs.
    """
    yield
    mark, cases = metafunc.definition.get_closest_marker("sampled"), metafunc._calls
    if mark and cases and not metafunc.config.getoption("--all"):
        count, *ids = mark.args
        chosen = [case.id for case in cases if case.id in ids]
        rest = [case.id for case in cases if case.id not in chosen]
        few = min(max(count, 1) - len(chosen), len(rest))
        chosen += random.Random(metafunc.definition.nodeid).sample(rest, few)
        cases[:] = [case for case in cases if case.id in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``sampled(0)``."""
    marks = [] if config.getoption("--all") else [i.get_closest_marker("sampled") for i in items]
    left_out = [item for item, mark in zip(items, marks, strict=False) if mark and not mark.args[0]]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def quick_proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models are saved and generate in the tests marked ``usage`` only: it takes a while."""
    if "usage" not in request.keywords:
        monkeypatch.setattr(mode_results, "run_whole_models", lambda *args: iter(()))


@contextmanager
def edit_weights(
    folder: Path, name: str = "model.safetensors"
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a file, to be changed in place."""
    found = load_file(folder / name)
    yield found
    contiguous = {tensor: each.contiguous() for tensor, each in found.items()}
    save_file(contiguous, folder / name, {"format": "pt"})


@contextmanager
def edit_json(file: Path) -> Iterator[dict[str, Any]]:
    """The contents of a JSON file, to be changed in place; empty if there is none."""
    content = json.loads(file.read_text()) if file.exists() else {}
    yield content
    file.write_text(json.dumps(content))


def flip_bit(file: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


class Called:
    """A pickle of this calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, to see that nothing changed."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
