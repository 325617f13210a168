"""Faults are found where they are, and named, whatever the family, and however its spaces grew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growkit
from growkit.engine.calls import CallError
from growkit.families.description import component_of
from growkit.families.family import families
from growkit.proof.localisation import cause_of
from growkit.proof.modes import DECODING, PREFILL, Mode, NotAskedError
from growkit.proof.side_by_side import stages_of
from growkit.results.proof_result import VerifyResult
from tests.conftest import edit_weights, listed, save_model, seeded

QUICK = {"prompts": 1, "length": 12}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 8}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = listed("localisation", "components")


def verified(source: Path, out: Path, name: str) -> VerifyResult:
    """The verdict on a folder in which a tensor is multiplied by 1.5, for as long."""
    file = out / "model.safetensors"
    before = file.read_bytes()
    with edit_weights(out) as tensors:
        tensors[name] *= 1.5
    result = growkit.verify(source, out, **QUICK)
    file.write_bytes(before)
    return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_components_of_every_family(kind: str, tmp_path: Path) -> None:
    config, factor, components = KINDS[kind]
    source, out = save_model(tmp_path / "source", kind, **config), tmp_path / "out"
    growkit.grow(source, out, hidden=factor, verify=False)
    assert growkit.verify(source, out, **QUICK)["fault"] is None
    for name in seeded(kind).sample(sorted(components), 2):
        fault = verified(source, out, name)["fault"]
        layer = 1 if ".1." in name else None
        found = (fault["layer"], fault["component"], fault["tensor"])
        assert found == (layer, components[name], name)


def test_every_tensor_has_a_component() -> None:
    for family in families().values():
        for tensor in (*family.tensors, *(each for form in family.other_forms for each in form)):
            inside = component_of(tensor) not in ("embedding", "norm", "lm_head")
            assert inside == ("{layer}" in tensor.name), tensor.name


def test_what_logits_say_of_uneven_copies(tmp_path: Path) -> None:
    """The factor is read off what modules hand on: only if these are compared copy by copy."""
    source = save_model(tmp_path / "source", "llama", num_attention_heads=2, num_key_value_heads=2)
    out = tmp_path / "out"
    growkit.grow(source, out, ffn=37, heads=4, verify=False)
    for name, component in (("self_attn.k_proj", "k_proj"), ("mlp.up_proj", "mlp")):
        result = verified(source, out, f"model.layers.1.{name}.weight")
        fault = result["fault"]
        assert result.sections.logits.first_differing_layer == 1
        assert (fault["layer"], fault["component"]) == (1, component)
        assert fault["factor"] == pytest.approx(1.5)


def test_gradients_of_experts_one_by_one(tmp_path: Path) -> None:
    """The class has them in one tensor, the files in many; only they have copies here."""
    source = save_model(tmp_path / "source", "mixtral", **EXPERTS)
    found = {}
    for symmetry in ("keep", "break"):
        out = tmp_path / symmetry
        growkit.grow(source, out, ffn="x2", symmetry=symmetry, verify=False)
        result = growkit.verify(source, out, **QUICK, trainability=True)
        assert not any("gradients" in note for note in result.notes)
        found[symmetry] = result.sections.trainability
    assert found["keep"]["copied"] == found["break"]["copied"] == 2 * 2 * 2 * 8
    assert not found["keep"]["trainable"]
    assert "block_sparse_moe.experts" in found["keep"]["first_identical"]
    assert found["break"]["trainable"]
    assert found["break"]["identical_gradients"] == 0


def test_a_skipped_mode_says_why_and_no_more() -> None:
    def stages() -> Any:
        raise CallError("the class cannot be run; such models cannot be proved", 1, "a reason")
        yield

    asked = [Mode(PREFILL, (None,)), Mode(DECODING, (None,))]  # type: ignore[arg-type]
    with pytest.raises(NotAskedError) as caught:
        list(stages_of(stages(), asked, by_target=False))
    skipped = caught.value.without(asked)[1]
    assert (skipped.note, skipped.failed) == ("a reason", False)
    with pytest.raises(NotAskedError) as caught:
        list(stages_of(stages(), asked, by_target=True))
    failed = caught.value.without(asked)[1]
    assert (failed.note, failed.failed) == ("the source can, but a reason", True)


# --- The cause of a difference is read off the tensor at fault, also in narrow dtypes -------------

SPACINGS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
ROWS, COLUMNS = 96, 64


def cause(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> tuple[float | None, str]:
    """The cause for a matrix that was changed and stored again, read in three blocks."""
    numbers = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, COLUMNS, generator=numbers, dtype=torch.float64).to(dtype)
    stored = change(weights.double()).to(dtype)
    blocks = zip(weights.split(40), stored.split(40), strict=True)
    factor, found = cause_of(blocks, SPACINGS[dtype])
    return factor, found


def other(weights: Tensor, rows: slice) -> Tensor:
    """Some rows of another matrix."""
    changed = weights.clone()
    changed[rows] = weights[rows].flip(1)
    return changed


@pytest.mark.parametrize("dtype", SPACINGS)
def test_other_causes(dtype: torch.dtype) -> None:
    """Also the control: no factor is reported where one row is not multiplied by it."""
    of_its_own = torch.linspace(2, 3, ROWS, dtype=torch.float64)[:, None]
    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda w: other(w, slice(0, 96)), "96 of 96 rows have other weights"),
        (lambda w: other(w, slice(5, 6)), "1 of 96 rows have other weights"),
        (lambda w: other(w * 1.05, slice(5, 6)), "96 of 96 rows have other weights"),
        (lambda w: w * of_its_own, "everything is multiplied, each by a number of its own"),
        (lambda w: w.roll(3, 0), "96 of 96 rows have other weights"),
    ]
    for change, sentence in cases:
        assert cause(dtype, change) == (None, sentence)
