"""Any part of a grown tensor is the same part of the written file, however it is computed."""

import hashlib
import json
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig

import growkit
from growkit.algebra import growth_law
from growkit.base.errors import InputError
from growkit.engine.recipe_planning import plan_recipe
from growkit.model.checkpoint import writing
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import family_of
from growkit.model.model import Headers
from growkit.planning import plan
from growkit.planning.recipe import Recipe, parse_recipe
from tests.files import edit_weights, folder_bytes
from tests.fuzz.targets import any_operation, chosen_options
from tests.models import SIZES, Make, same_bits, save_random, seeded
from tests.test_sizes import KINDS

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclass
class Case:
    """A source, and what is done with it."""

    config: PreTrainedConfig
    dtype: str
    steps: list[dict[str, Any]]
    seed: int


def any_case(seed: int) -> Case:
    """Any model of any family, and anything that operations say can be done to it."""
    chance = Random(seed)
    while True:
        kind = chance.choice(list(KINDS))
        config = CONFIG_MAPPING[kind](**KINDS[kind].any(chance))
        operations = [any_operation(chance) for _ in range(chance.choice([1, 1, 2]))]
        if any(operation.file_format for _, operation in operations):
            continue  # such files have their own tests
        taken = [
            {verb: operation.name, **chosen_options(chance, operation, 0)}
            for verb, operation in operations
        ]
        if any("calibration" in step or "auto" in step.values() for step in taken):
            continue  # texts are read for these
        content = {"source": "source", "output": "out", "verify": False, "steps": taken}
        settings = json.loads(config.to_json_string(use_diff=False))
        with suppress(InputError, AssertionError):  # numbers that headers do not have
            plan_recipe(
                parse_recipe(content, "recipe"),
                Headers(family_of(settings, kind), settings, "an example"),
            )
            return Case(config, chance.choice(DTYPES), taken, chance.randrange(10))


def recipe_of(case: Case, folder: Path) -> Recipe:
    """Save the source of a case; what is done with it goes to ``out``."""
    source = save_random(folder / "source", case.config, case.seed)
    file = source / "model.safetensors"
    dtype = getattr(torch, case.dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    content: dict[str, Any] = {"source": str(source), "output": str(folder / "out")}
    content |= {"steps": case.steps, "seed": case.seed, "verify": False}
    return parse_recipe(content, "recipe")


def look(case: Case, folder: Path, chance: Random, count: int) -> bool:
    """Write the output of a case, and compare slices of its tensors; false if there is none.

    Raises:
        AssertionError: a slice is not that part of the file.
    """
    recipe = recipe_of(case, folder)
    with suppress(InputError):  # a variant that the model is already, a dtype that rounds
        growkit.run(recipe)
    if not (folder / "out").exists():
        return False
    target = plan_recipe(recipe, Checkpoint(recipe.source)).lineage.target
    written = load_file(folder / "out" / "model.safetensors")
    for name in chance.choices(sorted(written), k=count):
        whole = written[name]
        where = [slice(*sorted(chance.choices(range(n + 1), k=2))) for n in whole.shape]
        part = target.read(name, *where)
        assert same_bits(part, whole[tuple(where)]), f"{case}: {name} {where}"
    return True


WAYS = 4
BLOCKS, WORKERS, SMALL = range(10, 23), range(1, 5), (0, 1 << 10, 1 << 26)


def digests(case: Case, folder: Path, chance: Random, ways: int) -> list[str]:
    """SHA-256 of what is written in so many ways; nothing if it cannot be had."""
    recipe, found = recipe_of(case, folder), []
    for _ in range(ways):
        settings = (chance.choice(BLOCKS), chance.choice(WORKERS), chance.choice(SMALL))
        try:
            with ExitStack() as stack:
                for module, name, value in (
                    (plan, "AT_A_TIME", 1 << settings[0]),
                    (writing, "WORKERS", settings[1]),
                    (plan, "SMALL", settings[2]),
                    (writing, "_write_tensor", _slow(chance.randrange(1 << 30))),
                ):
                    stack.enter_context(mock.patch.object(module, name, value))
                growkit.run(recipe)
        except InputError:  # a variant that the model is already, a dtype that rounds
            return []
        found.append(
            hashlib.sha256((folder / "out" / "model.safetensors").read_bytes()).hexdigest()
        )
        shutil.rmtree(folder / "out")
    return found


def _slow(seed: int) -> Any:
    """Tensors that are written in any order: each waits for a moment."""
    write, chance = writing._write_tensor, Random(seed)

    def waiting(*arguments: Any) -> None:
        time.sleep(chance.random() / 1000)
        write(*arguments)

    return waiting


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(300))
def test_any_slices(seed: int, tmp_path: Path) -> None:
    """Any models, steps and dtypes."""
    look(any_case(seed), tmp_path, seeded(seed), 12)


@pytest.mark.parametrize("method", ["hypercloning", "depth"])
def test_a_slice_reads_no_more_than_its_own_numbers(
    method: str, make: Make, reads: list[tuple[str, int]]
) -> None:
    source = make("llama", num_hidden_layers=2, intermediate_size=512)
    sizes = {"hypercloning": {"ffn": "x2"}, "depth": {"layers": "3"}}[method]
    step = growkit.GrowStep(method, sizes)
    recipe = growkit.Recipe(str(source), (step,), "out")
    target = plan_recipe(recipe, Checkpoint(source)).lineage.target
    for name, where in (("up", (slice(3, 9), slice(2, 7))), ("down", (slice(3, 9), slice(40, 90)))):
        reads.clear()
        part = target.read(f"model.layers.1.mlp.{name}_proj.weight", *where)
        assert 0 < sum(count for _, count in reads) <= part.numel()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_no_model_depends_on_how_the_work_is_cut_up(seed: int, tmp_path: Path) -> None:
    made: list[str] = []
    while not made:  # the next one, if this cannot be had
        made = digests(any_case(seed), tmp_path / str(seed), Random(seed), WAYS)
        seed += 1
    assert len(set(made)) == 1


def test_noise_in_the_order_of_the_work_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    drawn = np.random.default_rng(0)
    monkeypatch.setattr(
        growth_law,
        "noise",
        lambda key, rows, columns: drawn.integers(-9, 9, (len(rows), columns), "i2"),
    )
    case = Case(LlamaConfig(**SIZES), "float32", [{"grow": "hypercloning", "hidden": "x2"}], 0)
    assert len({*digests(case, tmp_path, Random(0), WAYS)}) > 1


DATE = "SOURCE_DATE_EPOCH"


def test_on_a_given_date_every_byte_is_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATE, "1767225600")
    source, quick = make("llama"), growkit.Settings(prompts=1, length=8)
    outs = [tmp_path / name / "out" for name in ("one", "other")]
    for out in outs:
        growkit.grow(source, out, hidden="x2", verify=quick)
    one, other = map(folder_bytes, outs)
    assert one == other
    manifest = json.loads(one["growkit.json"])
    assert manifest["created"] == manifest["verification"]["created"]
    assert manifest["created"] == "2026-01-01T00:00:00+00:00"
    monkeypatch.delenv(DATE)  # the control
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=quick)
    assert folder_bytes(tmp_path / "out")["growkit.json"] != one["growkit.json"]


def test_plans_take_time_in_proportion_to_tensors(make: Make) -> None:
    """1,600 tensors are planned and traced back in seconds, four times as long as 400."""
    config = Checkpoint(make("llama")).config
    steps = [{"grow": "hypercloning", "hidden": "x2"}] * 2
    recipe = parse_recipe({"source": "a", "output": "b", "steps": steps}, "recipe")
    seconds = []
    for layers in (44, 176):
        deep = config | {"num_hidden_layers": layers}
        source = Headers(family_of(config, "here"), deep, "an example")
        started = time.process_time()
        lineage = plan_recipe(recipe, source).lineage
        assert all(lineage.origin(name) == name for name in source.tensors)
        assert all(lineage.repeatable(name) for name in source.tensors)
        seconds.append(time.process_time() - started)
    assert len(source.tensors) > 1_500
    assert seconds[1] < 10 * seconds[0] + 1


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_number_that_is_none_is_found_in_the_part_that_is_read(make: Make) -> None:
    folder = make("llama")
    with edit_weights(folder) as weights:
        weights[HEAD][20, 3] = torch.nan
    checkpoint = Checkpoint(folder)
    for _ in range(2):  # what was seen to be finite does not speak for the rest
        checkpoint.read(HEAD, slice(21, 29))
        checkpoint.read(HEAD, slice(0, 10))
        checkpoint.read(HEAD, slice(10, 20))
        with pytest.raises(InputError, match=r"lm_head.* holds NaN"):
            checkpoint.read(HEAD, slice(20, 25))
        with pytest.raises(InputError, match=r"lm_head.* holds NaN"):
            checkpoint.read(HEAD)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True])
def test_a_proof_reads_large_matrices_in_parts(
    tied: bool, make: Make, tmp_path: Path, reads: list[tuple[str, int]], small_parts: int
) -> None:
    """As they are stored: those that grow in rows are held against the source's as a whole."""
    source = make("llama", tie_word_embeddings=tied, vocab_size=99)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    reads.clear()
    asked: Any = {"prompts": 2, "length": 12, "device": "cpu", "trainability": True}
    result = growkit.verify(source, tmp_path / "out", **asked)
    assert result["kept"]
    assert result.sections.logits.negative_control_caught
    assert result.sections.trainability.trainable
    of_vocabulary = {EMBEDDING} if tied else {EMBEDDING, HEAD}
    assert of_vocabulary <= {name for name, _ in reads}
    assert all(count <= small_parts for name, count in reads if name in of_vocabulary)
