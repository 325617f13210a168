"""``growkit probe``: candidates are trained as torch and transformers train them, and ranked."""

import json
import math
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import growkit
from growkit.cli.demo import held_out_text
from growkit.extras.probing import ranking as noise
from growkit.extras.probing.arms import Data, make_data
from growkit.extras.probing.harness import batch_of, flops_of
from growkit.extras.probing.json_lines import JOURNAL, Work
from growkit.extras.probing.probe_settings import ProbeSettings, candidates_of, fitting
from growkit.extras.probing.results.probe_result import probe_next, probe_sentence
from growkit.extras.probing.views.probe_page import probe_view
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import shipped_recipe
from growkit.report.saving import page as page_of
from growkit.sources import find
from tests.commands import cli
from tests.files import flip_bit, listed, with_tokenizer
from tests.models import save_model
from tests.test_python import SCHEMA, as_json, wrong
from tests.test_report import HOSTILE, OUTSIDE, Tags, poisoned

CPU = torch.device("cpu")
SETTINGS = ProbeSettings(steps=4, seeds=2, lr=(3e-3,), warmup=0, batch=2, length=16, device="cpu")
OPTIONS = shlex.split("--steps 4 --seeds 2 --warmup 0 --batch 2 --length 16 --device cpu")


def byte_model(folder: Path, kind: str = "llama", **config: Any) -> Path:
    """A tiny random model that reads bytes."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 1, **config}
    return with_tokenizer(save_model(folder, kind, **sizes))


def recipe(file: Path, steps: str, verify: str = "false", more: str = "") -> Path:
    file.write_text(f"steps:\n  - {steps}\nverify: {verify}\n{more}")
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a text, and recipes: one that can be grown, one that cannot, a broken one."""
    folder = tmp_path_factory.mktemp("probe")
    byte_model(folder / "source")
    (folder / "text.txt").write_text(held_out_text()[:6000])
    recipe(folder / "wide.yaml", "{grow: hypercloning, ffn: x2}")
    recipe(folder / "small.yaml", "{grow: hypercloning, hidden: 4}")
    stuck = "{grow: hypercloning, ffn: x2, symmetry: keep}"
    recipe(folder / "stuck.yaml", stuck, "{prompts: 1, length: 8, trainability: true}")
    return folder


def probed(place: Path, *candidates: str, **options: Any) -> growkit.ProbeResult:
    settings = options.pop("settings", SETTINGS)
    files = [place / f"{name}.yaml" for name in candidates]
    return growkit.probe(place / "source", files, place / "text.txt", settings, **options)


@pytest.fixture(scope="module")
def found(place: Path) -> growkit.ProbeResult:
    """Three candidates and two rates, of which one is far too high."""
    words = ["probe", str(place / "source"), "--candidates"]
    words += [str(place / f"{name}.yaml") for name in ("stuck", "small", "wide")]
    words += ["--text", str(place / "text.txt"), *OPTIONS, "--lr", "3e-3", "1e15", "--json"]
    words += ["--work", str(place / "work"), "--report", str(place / "page.html")]
    done = cli(*words)
    assert done.exit_code == 0, done.output
    return restored(json.loads(done.stdout))


def restored(result: dict[str, Any]) -> growkit.ProbeResult:
    return growkit.ProbeResult(**result)


def quick(**changes: Any) -> ProbeSettings:
    return ProbeSettings(**{**vars(SETTINGS), **changes})


def by_name(result: Any) -> dict[str, Any]:
    return {each["name"]: each for each in result["candidates"]}


def test_what_cannot_be_grown_or_is_broken_comes_last(found: growkit.ProbeResult) -> None:
    assert [each["outcome"] for each in found["candidates"]] == [
        *("ranked", "ranked", "broken", "refused")
    ]
    told = by_name(found)
    assert [told[name]["rank"] for name in ("stuck", "small")] == [3, None]
    assert "identical" in told["stuck"]["reason"]
    assert "hidden 4 is less than the present 16" in told["small"]["reason"]
    assert told["stuck"]["curves"] == told["small"]["curves"] == []
    assert {told["source"]["rank"], told["wide"]["rank"]} == {1, 2}
    for name in ("source", "wide"):
        assert told[name]["lr"] == 3e-3
        assert [loss is None for loss in told[name]["by_lr"]] == [False, True]
    assert [] in [wrong(as_json(found), each) for each in SCHEMA["anyOf"]]
    ranked = [each["loss"] for each in found["candidates"][:2]]
    assert ranked == sorted(ranked)
    (pair,) = found["differences"]
    assert pair["difference"] == pytest.approx(ranked[1] - ranked[0])
    assert pair["noise"] == (pair["low"] <= 0 <= pair["high"])


def data_of(place: Path, settings: ProbeSettings = SETTINGS) -> Data:
    source = place / "source"
    return make_data(place / "text.txt", source, Checkpoint(source).config, settings)


def trained_by_hand(
    folder: Path, data: Data, seed: int, factors: dict[str, tuple[float, float, float]]
) -> list[float]:
    """Held-out losses before and after every step: transformers' class, torch's AdamW.

    Args:
        folder: the model.
        data: the windows.
        seed: of their order.
        factors: of rate, decay and eps of some parameters, by the end of their names.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = []
    for name, parameter in model.named_parameters():
        ending = name.removesuffix(".weight").rpartition(".")[2]
        rate, decay, eps = factors.get(ending, (1.0, 1.0, 1.0))
        decay *= 0.1 if parameter.dim() > 1 else 0.0
        group = {"lr": 3e-3 * rate, "weight_decay": decay, "eps": 1e-8 * eps}
        groups.append({"params": [parameter], **group})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(5):
        with torch.no_grad():
            losses.append(float(model(data.held_out, labels=data.held_out).loss))
        batch = batch_of(data.training, seed, 2 * step, 2)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


WIDE = {"down_proj": (0.5, 2.0, 1.0), "up_proj": (1.0, 1.0, 0.5), "gate_proj": (1.0, 1.0, 0.5)}
"""The law for an MLP of twice the size (``docs/how-to/training.md``)."""


def test_losses_are_those_of_torch_and_transformers(
    place: Path, found: growkit.ProbeResult
) -> None:
    data, told = data_of(place), by_name(found)
    for name, folder, factors in (
        ("source", place / "source", {}),
        ("wide", place / "work" / "03-wide", WIDE),
    ):
        curves = [each for each in told[name]["curves"] if each["lr"] == 3e-3]
        for curve in curves:
            by_hand = trained_by_hand(folder, data, curve["seed"], factors)
            expected = [by_hand[step] for step in curve["steps"]]
            assert curve["losses"] == pytest.approx(expected, abs=2e-6)
        assert curves[0]["losses"][-1] != curves[1]["losses"][-1]
    without = trained_by_hand(place / "work" / "03-wide", data, 1, {})  # the controls
    assert abs(curves[1]["losses"][-1] - without[-1]) > 1e-4
    other = trained_by_hand(place / "work" / "03-wide", data, 0, WIDE)
    assert abs(curves[1]["losses"][-1] - other[-1]) > 1e-4


def test_losses_are_compared_at_equal_compute(found: growkit.ProbeResult) -> None:
    """Between two looks in a straight line; the cheapest is at its end."""
    told = by_name(found)
    source, wide = told["source"], told["wide"]
    assert found["equal_compute"] == 4 * source["step_flops"] < 4 * wide["step_flops"]
    assert (source["equal_step"], source["loss"]) == (4, source["last_loss"])
    at = found["equal_compute"] / wide["step_flops"]
    assert 1 < at < 4
    for curve, loss in zip(wide["curves"][:2], wide["losses"], strict=True):
        before = max(step for step in curve["steps"] if step <= at)
        after = min(step for step in curve["steps"] if step >= at)
        assert after - before == 1
        low, high = (curve["losses"][curve["steps"].index(step)] for step in (before, after))
        assert loss == pytest.approx(low + (at - before) * (high - low))
    assert wide["loss"] == pytest.approx(fmean(wide["losses"]))


@pytest.mark.parametrize("length", [8, 24])
@pytest.mark.parametrize("fused", [False, True])
def test_flops_are_those_of_the_formula(fused: bool, length: int, tmp_path: Path) -> None:
    """6 N and attention, for every token (arXiv 2204.02311, appendix B); noise heads are heads."""
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes["head_dim"] = 8
    if fused:
        kind = {"lambda_type": "projected", "noise_keys": "shared", "value_head_dim": 8}
        config = growkit.DiffTransformerConfig(**sizes, **kind, num_noise_heads=2)
        model: Any = growkit.DiffTransformerForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(tmp_path)
    linear = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    weights = sum(each.weight.numel() for each in linear)
    expected = (6 * weights + 12 * 2 * 6 * 8 * length) * length
    assert flops_of(tmp_path, torch.arange(length), CPU) == expected
    assert flops_of(tmp_path, torch.arange(length - 1), CPU) != expected  # the control


@pytest.mark.parametrize(
    ("kind", "layers", "name", "expected"),
    listed("probe", "shipped recipes take the next possible size"),
)
def test_shipped_recipes_take_the_next_possible_size(
    kind: str, layers: int, name: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    source = save_model(tmp_path / "source", kind, num_hidden_layers=layers)
    copied = tmp_path / f"{name}.yaml"
    copied.write_bytes(shipped_recipe(name).read_bytes())
    for given, sizes in ((name, expected), (copied, None)):
        (candidate,) = candidates_of([given], str(source), find(str(source)))
        found = fitting(candidate, find(str(source)))
        if sizes is None:  # a recipe of one's own means its sizes
            assert found == candidate
        else:
            assert [dict(step.options) for step in found.recipe.steps] == sizes
            assert bool(found.note) == (found != candidate)


def test_what_is_only_stored_otherwise_trains_as_the_source(place: Path, tmp_path: Path) -> None:
    """With a decay that shows: λ decays as with Trainer. Layouts without a class cannot train."""
    source, text = byte_model(tmp_path / "diff", "diffllama", head_dim=8), place / "text.txt"
    motif, diff = "{convert: motif}", "{convert: diff-transformer}"
    ways = {"a": motif, "b": f"{motif}\n  - {diff}", "same": diff}
    files = [recipe(tmp_path / f"{name}.yaml", steps) for name, steps in ways.items()]
    told = by_name(growkit.probe(source, files, text, quick(steps=2, weight_decay=100.0)))
    assert told["a"]["reason"].endswith("end the recipe with 'convert: diff-transformer'")
    for name, looks in (("b", 1), ("same", 3)):  # λ is solved again on the way to Motif's layout
        found, expected = (told[each]["curves"][0]["losses"][:looks] for each in (name, "diff"))
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_loss_that_is_not_finite_comes_last(place: Path) -> None:
    result = probed(place, "wide", settings=quick(lr=(1e15,)))
    assert [each["outcome"] for each in result["candidates"]] == ["diverged"] * 2
    assert "not finite" in result["candidates"][1]["reason"]
    assert result["differences"] == []
    Tags(page_of(probe_view(result)))


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "a loss": lambda lines: _with(lines, 4, lambda each: each["looks"][-1][1].reverse()),
    "a cost": lambda lines: _with(lines, 3, lambda each: each.update(step_flops=1)),
    "a setting": lambda lines: _with(lines, 0, lambda each: each["plan"].update(seeds="0" * 64)),
    "half a line": lambda lines: [*lines[:4], lines[4][: len(lines[4]) // 2], *lines[5:]],
    "a deep line": lambda lines: [*lines, '{"plan": {"a": ' + "[" * 10**5],
}
"""How a journal is edited by hand."""


def _with(lines: list[str], number: int, edit: Callable[[Any], object]) -> list[str]:
    line = json.loads(lines[number])
    edit(line)
    return [*lines[:number], json.dumps(line), *lines[number + 1 :]]


@pytest.mark.parametrize("name", ["steps", "seeds", "warmup", "batch", "length"])
@pytest.mark.parametrize("value", [2.5, 4.0, "4", True])
def test_counts_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(growkit.InputError, match=f"^{name} is .*; a whole number was expected$"):
        ProbeSettings(**{name: value})


class Killed(BaseException):
    """What nobody expects."""


def test_a_killed_probe_goes_on_with_the_same_figures(
    place: Path, found: growkit.ProbeResult, tmp_path: Path, monkeypatch: Any
) -> None:
    work, settings = tmp_path / "work", quick(lr=(3e-3, 1e15))
    names = ("stuck", "small", "wide")
    note, trainings = Work.note, []

    def killing(self: Work, line: Any) -> Any:
        if len(trainings) == 3:
            raise Killed
        trainings.extend([line] if "trained" in line else [])
        return note(self, line)

    with monkeypatch.context() as patched:
        patched.setattr(Work, "note", killing)
        with pytest.raises(Killed):
            probed(place, *names, settings=settings, work=work)
    with (work / JOURNAL).open("a") as journal:
        journal.write('{"trained": "source", "lr": 0.003, "seed": 1, "loo')  # a line cut off
    with pytest.raises(
        growkit.InputError, match="holds an earlier probe; continue it with --resume"
    ):
        probed(place, *names, settings=settings, work=work)
    other = quick(lr=settings.lr, batch=1)
    with pytest.raises(growkit.InputError, match="cannot be resumed: batch differs now"):
        probed(place, *names, settings=other, work=work, resume=True)
    grown = {file: file.stat().st_mtime_ns for file in work.glob("*/model.safetensors")}
    again = probed(place, *names, settings=settings, work=work, resume=True)
    assert {file: file.stat().st_mtime_ns for file in grown} == grown  # nothing is grown again
    for key in ("candidates", "differences", "reason", "equal_compute"):
        assert again[key] == found[key]
    assert len((work / JOURNAL).read_text().splitlines()) == 1 + 3 + 8
    whole = (work / JOURNAL).read_text().splitlines()
    for edit in EDITS.values():
        (place / JOURNAL).write_text("\n".join([*edit(whole), ""]))
        (place / JOURNAL).replace(work / JOURNAL)
        with pytest.raises(
            growkit.InputError, match=f"{JOURNAL} is damaged; choose another --work"
        ):
            probed(place, *names, settings=settings, work=work, resume=True)
    (work / JOURNAL).write_text("\n".join([*whole[:-1], ""]))  # as after a kill
    again = probed(place, *names, settings=settings, work=work, resume=True)
    assert again["candidates"] == found["candidates"]
    flip_bit(work / "03-wide" / "model.safetensors")
    with pytest.raises(growkit.InputError, match="has been changed since it was grown"):
        probed(place, *names, settings=settings, work=work, resume=True)


@pytest.mark.parametrize("text", ["漢字かな交じり文" * 500, "漢字 " * 1300])
def test_the_last_tenth_is_a_tenth_in_every_language(
    place: Path, tmp_path: Path, text: str
) -> None:
    """With or without blanks between its words; where it has some, no word is cut."""
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    source = place / "source"
    settings = quick(steps=500)  # takes all of it
    data = make_data(tmp_path / "text.txt", source, Checkpoint(source).config, settings)
    held_out, training = data.held_out.numel(), data.training.numel()
    assert held_out / (held_out + training) == pytest.approx(0.1, abs=0.02)
    assert bytes(data.held_out[0].tolist()).decode(errors="replace").startswith(text[:1])


def test_intervals_are_those_of_the_table_of_t() -> None:
    """Abramowitz and Stegun, table 26.10."""
    table = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604)}
    for freedom, expected in table.items():
        assert tuple(round(noise.t_beyond(p, freedom), 3) for p in (0.05, 0.01)) == expected


@pytest.mark.parametrize("spreads", [(1, 0, 0), (0, 1, 0), (0.3, 1, 1), (0, 0, 1)])
def test_noise_is_taken_for_a_difference_in_one_of_twenty(spreads: tuple[float, ...]) -> None:
    """Differences vary by seed, by window, and freely; with one window, by seed alone."""
    rng, runs = random.Random(7), 400

    def drawn() -> list[list[float]]:
        by_window = [rng.gauss(0, spreads[1]) for _ in range(12)]
        by_seed = [rng.gauss(0, spreads[0]) for _ in range(3)]
        return [[a + b + rng.gauss(0, spreads[2]) for b in by_window] for a in by_seed]

    samples = [drawn() for _ in range(runs)]
    false = sum(not noise.paired_difference(each).noise for each in samples)
    assert false / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    shifted = [[x + 20 for x in row] for row in samples[0]]
    assert not noise.paired_difference(shifted).noise  # the control
    assert noise.paired_difference(shifted, pairs=45).high > noise.paired_difference(shifted).high


def test_the_page_is_whole_and_safe(place: Path, found: growkit.ProbeResult) -> None:
    page = (place / "page.html").read_text()
    shown = Tags(page).text
    assert not OUTSIDE.search(page)
    words = ("Loss by compute", "wide", "source, trained further", "small", "stuck")
    assert [word for word in (*words, "Satterthwaite") if word not in shown] == []
    hostile = poisoned(json.loads(json.dumps(found)), HOSTILE)
    for given, each in zip(found["candidates"], hostile["candidates"], strict=True):
        each["outcome"] = given["outcome"]
    hostile["differences"] = []
    unsafe = page_of(probe_view(hostile))
    Tags(unsafe)
    assert not OUTSIDE.search(unsafe)


def pair(better: str, worse: str, *, noise: bool) -> dict[str, Any]:
    interval = {"low": -0.5 if noise else 0.125, "high": 1.0, "noise": noise}
    return {"better": better, "worse": worse, "difference": 0.25, **interval}


@pytest.mark.parametrize(("better", "noisy", "reason", "what"), listed("probe", "what to do next"))
def test_what_was_found_and_what_to_do_next(
    found: growkit.ProbeResult, better: str, noisy: bool, reason: str, what: str
) -> None:
    other = "source" if better == "wide" else "wide"
    result = json.loads(json.dumps(found)) | {"early": False}
    result["candidates"].sort(
        key=lambda each: [better, other, "stuck", "small"].index(each["name"])
    )
    result["differences"] = [pair(better, other, noise=noisy)]
    sentence = probe_sentence(result)
    assert re.match(reason, sentence)
    assert what in probe_next(result)
    assert "so far</h1>" not in page_of(probe_view(result | {"reason": sentence}))
    result["early"] = True
    assert "more --steps" in probe_next(result)
    page = page_of(probe_view(result | {"reason": probe_sentence(result)}))
    assert "so far</h1>" in page
    assert ">0.2500" in page[page.index("<h2>What is noise") :]
