"""Faults are found where they are, and named, whatever the family, and however its spaces grew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import growkit
from growkit.engine.calls import CallError
from growkit.model.families.family import families
from growkit.model.families.family_parts import component_of
from growkit.proof.modes import DECODING, PREFILL, Mode, NotAskedError
from growkit.proof.side_by_side import stages_of
from growkit.results.proof_result import VerifyResult
from tests.files import edit_weights, listed
from tests.models import save_model, seeded

QUICK = {"prompts": 1, "length": 12}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 8}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = listed("localisation", "components")


def times(tensor: Tensor) -> Tensor:
    return tensor * 1.5


def verified(
    source: Path, out: Path, name: str, spoil: Callable[[Tensor], Tensor] = times
) -> VerifyResult:
    """The verdict on a folder in which a tensor is spoiled, for as long."""
    file = out / "model.safetensors"
    before = file.read_bytes()
    with edit_weights(out) as tensors:
        tensors[name] = spoil(tensors[name])
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
    flipped = verified(source, out, "model.layers.1.mlp.up_proj.weight", lambda w: w.flip(1))
    assert flipped["fault"]["factor"] is None  # the control


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
