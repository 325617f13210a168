"""Logits of other programs: rounding is told from settings, conventions and faults."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.extras.program_logits.results.engine_result import EngineResult
from growkit.model.checkpoint.writing import sha256
from tests.commands import Counted, cli
from tests.converted import FILES
from tests.files import edit_config, edit_weights, listed
from tests.models import save_model

SIZES: dict[str, Any] = listed("engines", "sizes")
TOKENS = 48
MODELS: dict[str, dict[str, Any]] = listed("engines", "models")


def source_of(folder: Path, kind: str, seed: int = 0) -> Path:
    return save_model(folder, kind, seed, torch.bfloat16, **{**SIZES, **MODELS[kind]})


def as_run(
    folder: Path,
    file: Path,
    dtype: str = "bfloat16",
    seed: int = 0,
    hidden: bool = False,
    given: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
) -> Path:
    """What transformers computes in a dtype, in a file; it may get other ids than the file says."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (TOKENS,), generator=generator)
    with torch.no_grad():
        output = model(given(ids)[None], output_hidden_states=hidden, use_cache=False)
    tensors = {"ids": ids, "logits": output.logits[0, -TOKENS:].float()}
    for number, states in enumerate(output.hidden_states[:-1] if hidden else ()):
        tensors[f"hidden.{number}"] = states[0]
    save_file(tensors, file, {"program": "engine", "dtype": dtype})
    return file


def verdict_of(source: Path, *files: Path) -> EngineResult:
    return growkit.verify_logits(source, files)


SETTINGS: list[tuple[str, dict[str, Any], str]] = listed("engines", "wrong settings")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_a_wrong_setting_is_named(tmp_path: Path, case: int, seed: int) -> None:
    kind, changes, told = SETTINGS[case]
    source = source_of(tmp_path / "source", kind, seed)
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edit_config(wrong, **changes)
    result = verdict_of(source, as_run(wrong, tmp_path / "logits.safetensors", seed=seed))
    assert (result.verdict, result.kept) == ("another setting", False), result.reason
    assert told in result.reason


VALUES: list[tuple[str, dict[str, Any], str]] = listed("engines", "values")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", range(len(VALUES)))
def test_any_value_of_a_setting_is_found(tmp_path: Path, case: int, seed: int) -> None:
    kind, changes, told = VALUES[case]
    source = source_of(tmp_path / "source", kind, seed)
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edit_config(wrong, **changes)
    result = verdict_of(source, as_run(wrong, tmp_path / "logits", "float32", seed))
    assert told in result.reason


@pytest.mark.sampled(1, "float32-0-llama")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", MODELS)
def test_no_value_of_a_setting_stands_for_a_fault(
    tmp_path: Path, kind: str, seed: int, dtype: str
) -> None:
    source = source_of(tmp_path / "source", kind, seed)
    wrong = shutil.copytree(source, tmp_path / "wrong")
    parts = ["layers.1.*q_proj.weight", "layers.0.*v_proj.weight", "layers.1.*layernorm.weight"]
    edited(parts[seed % 3], lambda w: w * (1.3 + seed / 10))(wrong)
    result = verdict_of(source, as_run(wrong, tmp_path / "logits", dtype, seed))
    assert " in place of " not in result.reason


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", MODELS)
def test_rounding_is_no_fault(tmp_path: Path, kind: str, seed: int, dtype: str) -> None:
    source = source_of(tmp_path / "source", kind, seed)
    file = as_run(source, tmp_path / "logits.safetensors", dtype, seed, hidden=True)
    progress = Counted()
    result = growkit.verify_logits(source, [file], progress=progress)
    assert progress.done == progress.total != {}
    assert (result.verdict, result.kept) == ("rounding", True), result.reason
    (program,) = result.sections.engine.programs
    assert program.first_differing_layer is None
    assert len(program.by_layer) == MODELS[kind].get("num_hidden_layers", 3)


def pairs_of_neighbours(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, 2, 4, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def edited(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def edit(folder: Path) -> None:
        with edit_weights(folder) as state:
            for name in state:
                if re.search(pattern, name):
                    state[name] = change(state[name]).contiguous()

    return edit


def untie(folder: Path) -> None:
    with edit_weights(folder) as state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


CONVENTIONS: list[tuple[str, Callable[[Path], None], str]] = [
    ("llama", edited("norm", lambda w: w + 1), "1 added to the weights of norms"),
    ("gemma2", edited("norm", lambda w: w - 1), "1 subtracted from the weights of norms"),
    ("llama", untie, "takes the embedding for its head"),
    ("qwen2", edited("bias", torch.zeros_like), "leaves out biases:"),
    ("stablelm", edited("proj.bias", torch.zeros_like), "leaves out biases of attention:"),
    ("llama", edited("embed_tokens", lambda w: w.float() * 32**0.5), "embeddings by √32"),
    ("llama", edited(r"[qk]_proj", pairs_of_neighbours), "rotary pairs in another order"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(len(CONVENTIONS)))
def test_another_convention_is_named(tmp_path: Path, case: int) -> None:
    kind, edit, told = CONVENTIONS[case]
    source = source_of(tmp_path / "source", kind)
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edit(wrong)
    result = verdict_of(source, as_run(wrong, tmp_path / "logits.safetensors", "float32"))
    assert result.verdict == "another setting", result.reason
    assert told in result.reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shift", [0, 1])
def test_other_tokens_and_rows_are_named(tmp_path: Path, shift: int) -> None:
    source, file = source_of(tmp_path / "source", "llama"), tmp_path / "logits.safetensors"
    as_run(source, file, given=lambda ids: torch.cat([torch.ones(1 - shift, dtype=int), ids]))
    tensors = load_file(file)
    tensors["logits"] = tensors["logits"].roll(shift, 0)
    save_file(tensors, file, {"program": "engine", "dtype": "bfloat16"})
    told = "a position into the row after it" if shift else "puts token 1 (bos_token_id) before"
    assert told in verdict_of(source, file).reason


@pytest.mark.sampled(1, "int8-True")
@pytest.mark.parametrize(("dtype", "kept"), [("int8", True), ("float32", False)])
def test_blocks_of_eight_bits_round_as_in_llama_cpp(tmp_path: Path, dtype: str, kept: bool) -> None:
    """llama.cpp wrote the logits of the quantised file, whose numbers are the source's here."""
    pytest.importorskip("gguf")
    model, logits = FILES / "llama.q4_k_m", FILES / "llama.q4_k_m.logits.safetensors"
    shutil.copy(model, tmp_path / "model.gguf")
    save_file(load_file(logits), tmp_path / "logits", {"program": "llama.cpp", "dtype": dtype})
    result = verdict_of(tmp_path / "model.gguf", tmp_path / "logits")
    assert result.kept is kept
    (program,) = result.sections.engine.programs
    assert not kept or 0.5 < program.inflation < 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_first_layer_with_a_fault_is_named(tmp_path: Path, dtype: str) -> None:
    source = source_of(tmp_path / "source", "llama")
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edited("layers.1.mlp.down_proj", lambda w: w * 1.5)(wrong)
    result = verdict_of(source, as_run(wrong, tmp_path / "logits", dtype, hidden=True))
    assert result.verdict == "another function"
    assert result.sections.engine.programs[0].first_differing_layer == 1
    assert "the first difference is in model.layers.1" in result.reason


def with_top(file: Path, k: int, rows: slice) -> Path:
    """The largest log-probabilities of some rows, as JSON."""
    tensors, logits = load_file(file), load_file(file)["logits"]
    top = logits[rows].double().log_softmax(-1).topk(k)
    content = {"program": "engine", "dtype": "bfloat16", "ids": tensors["ids"].tolist()}
    content |= {"top_ids": top.indices.tolist(), "top_logprobs": top.values.tolist()}
    content["positions"] = list(range(TOKENS))[rows]
    file.with_suffix(".json").write_text(json.dumps(content))
    return file.with_suffix(".json")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("k", "rows"), [(1, slice(0, 40)), (5, slice(40, 41))])
def test_some_log_probabilities_are_enough(tmp_path: Path, k: int, rows: slice) -> None:
    source = source_of(tmp_path / "source", "llama")
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edit_config(wrong, **SETTINGS[0][1])
    right, other = (
        verdict_of(source, with_top(as_run(folder, tmp_path / "x.safetensors"), k, rows))
        for folder in (source, wrong)
    )
    assert (right.verdict, other.verdict) == ("rounding", "another setting"), other.reason
    assert "rope_type default" in other.reason
    assert f"gives {k} of 64 tokens at a position" in right.reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("digits", [1, 3])
def test_decimals_of_a_file_are_rounding(tmp_path: Path, digits: int) -> None:
    source = source_of(tmp_path / "source", "llama")
    wrong = shutil.copytree(source, tmp_path / "wrong")
    edit_config(wrong, **SETTINGS[0][1])
    for folder, verdict in ((source, "rounding"), (wrong, "another setting")):
        file = with_top(as_run(folder, tmp_path / "x.safetensors", "float32"), 5, slice(None))
        content = json.loads(file.read_text()) | {"dtype": "float32"}
        logs = torch.tensor(content["top_logprobs"], dtype=torch.float64)
        content["top_logprobs"] = logs.round(decimals=digits).tolist()
        file.write_text(json.dumps(content))
        result = verdict_of(source, file)
        assert result.verdict == verdict, result.reason
        assert f"in float32, rounded to {digits} decimal" in result.reason


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "writes logarithms to base 10": lambda logs: logs / torch.tensor(10.0).log(),
    "normalises the probabilities of top_ids alone": lambda logs: logs.log_softmax(-1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("told", FORMS)
def test_another_form_of_log_probabilities_is_named(tmp_path: Path, told: str) -> None:
    source = source_of(tmp_path / "source", "llama")
    file = with_top(as_run(source, tmp_path / "x.safetensors"), 5, slice(None))
    content = json.loads(file.read_text())
    content["top_logprobs"] = FORMS[told](torch.tensor(content["top_logprobs"])).tolist()
    file.write_text(json.dumps(content))
    assert told in verdict_of(source, file).reason


NOT_AS_SAID: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("float32", lambda logits: logits / 0.7, "multiplies logits by 1.429, as a temperature of 0.7"),
    (
        "bfloat16",
        lambda logits: logits,
        "rounds as bfloat16 does, not as float32, the dtype in its file",
    ),
    (
        "float32",
        lambda logits: logits + 1e-4 * (torch.arange(logits.numel()) * 12.9).sin().view_as(logits),
        "rounds more than float32 does, as with a cache in float16 or TF32",
    ),
    ("float32", lambda logits: logits.softmax(-1), "writes probabilities in place of logits"),
    (
        "float32",
        lambda logits: logits.where(logits < logits.max(), -torch.inf),
        "not finite at 1 of",
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(len(NOT_AS_SAID)))
def test_logits_that_are_not_what_the_file_says(tmp_path: Path, case: int) -> None:
    dtype, change, told = NOT_AS_SAID[case]
    source, file = source_of(tmp_path / "source", "llama"), tmp_path / "logits.safetensors"
    tensors = load_file(as_run(source, file, dtype))
    tensors["logits"] = change(tensors["logits"].float())
    save_file(tensors, file, {"program": "engine", "dtype": "float32"})
    assert told in verdict_of(source, file).reason
    top = with_top(file, 3, slice(None))
    content = json.loads(top.read_text())
    content["top_logprobs"][0][0] = 0.1
    top.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"natural logarithms .* were expected, none above 0"):
        verdict_of(source, top)


def test_a_mistake_is_named_beside_more_rounding_than_the_file_says(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama")
    wrong = Path(shutil.copytree(source, tmp_path / "wrong"))
    edit_config(wrong, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    file = tmp_path / "logits.safetensors"
    tensors = load_file(as_run(wrong, file, "float16"))
    save_file(tensors, file, {"program": "engine", "dtype": "float32"})
    assert "rope_type default in place of llama3" in verdict_of(source, file).reason


def test_the_nearer_of_two_programs_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama")
    files = [as_run(source, tmp_path / dtype, dtype) for dtype in ("bfloat16", "float16")]
    assert verdict_of(source, *files).reason.count("engine is the nearest to strict float64") == 1
    assert "chance may explain" in verdict_of(source, files[0], files[0]).reason
    with pytest.raises(InputError, match="have other ids or positions"):
        verdict_of(source, files[0], as_run(source, tmp_path / "other", seed=1))


def test_a_conversion_and_its_program_have_one_verdict(tmp_path: Path) -> None:
    """The weights agree, the program's logits do not; and the card has both, and no path."""
    source = source_of(tmp_path / "source", "llama")
    copy, wrong = (shutil.copytree(source, tmp_path / name) for name in ("copy", "wrong"))
    edit_config(wrong, **SETTINGS[0][1])
    file, card = as_run(wrong, tmp_path / "logits.safetensors"), tmp_path / "card.md"
    words = ("verify", source, copy, "--logits", file, "--prompts", 1, "--length", 12)
    done = cli(*words, "--report", card)
    assert done.exit_code == 1, done.output
    said, text = " ".join(done.stdout.split()), card.read_text()
    assert "the converted weights are not at fault" in said
    assert text.startswith("## Verification: another setting\n\n`copy` against `source`: engine ")
    for told in ("| logits of engine | not kept |", sha256(copy / "model.safetensors")):
        assert told in text
    assert str(tmp_path) not in text
    done = cli("verify", source, "--logits", file, "--report", tmp_path / "page.html", "--json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "another setting")
