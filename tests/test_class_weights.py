"""Weights as the class has them, one parameter at a time: what transformers makes of the files."""

import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.engine.class_weights import empty_model, persistent_buffers
from growkit.engine.device import CPU
from growkit.engine.lending import Lender
from growkit.engine.strict import strict_float64
from growkit.model.checkpoint.reading import Checkpoint
from tests.architectures import TYPES, build, save
from tests.files import edit_weights, listed
from tests.models import same_bits

QUICK: dict[str, Any] = {"prompts": 2, "length": 16}

KINDS = listed("class_weights", "kinds")
EMBEDDING = "model.embed_tokens.weight"


def loaded(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All that transformers has in memory of a model, but for what it makes itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in (found | persistent_buffers(model)).items()}


def lent(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same, as the modules of a model are lent it."""
    model, weights, stored = empty_model(Checkpoint(folder), dtype)
    lender = Lender(weights, stored, dtype, CPU)
    buffers = persistent_buffers(model)
    found = {
        name: lender.whole(name, buffer.dtype) if stored(name) in weights.tensors else buffer
        for name, buffer in buffers.items()
    }
    for path, module in model.named_modules(remove_duplicate=False):
        own = (key for key, parameter in module._parameters.items() if parameter is not None)
        names = {key: f"{path}.{key}".strip(".") for key in own}
        with lender.lent(module, names):
            for key, name in names.items():
                found[name] = getattr(module, key).detach()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_weight_is_what_transformers_loads(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    folder = save(kind, tmp_path / "model")
    found = lent(folder, dtype)
    expected = loaded(folder, dtype)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


def test_a_changed_bit_shows(tmp_path: Path) -> None:
    """The control."""
    folder = save("mixtral", tmp_path / "model")
    before = loaded(folder, torch.float32)
    with edit_weights(folder) as tensors:
        name = next(name for name in tensors if "w3" in name)
        tensors[name].view(torch.int32).view(-1)[5] ^= 1
    after = lent(folder, torch.float32)
    assert sum(not same_bits(before[name], after[name]) for name in before) == 1


def renamed(kind: str, *names: tuple[str, str]) -> Callable[[Path], None]:
    """A model whose files have other names."""

    def make(folder: Path) -> None:
        save(kind, folder)
        with edit_weights(folder) as tensors:
            for name in list(tensors):
                new = reduce(lambda text, pair: text.replace(*pair), names, name)
                tensors[new] = tensors.pop(name)

    return make


def in_several_dtypes(folder: Path) -> None:
    save("mixtral", folder)
    with edit_weights(folder) as tensors:
        for name in list(tensors)[::3]:
            tensors[name] = tensors[name].bfloat16()


def as_its_class(folder: Path) -> None:
    model = build("mixtral")
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


def tied(**factors: float) -> Callable[[Path], None]:
    """A tied model, of whose embedding and head these are stored."""

    def make(folder: Path) -> None:
        model = build("llama")
        model.config.tie_word_embeddings = True
        model.config.save_pretrained(folder)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        embedding = tensors.pop(EMBEDDING)
        del tensors["lm_head.weight"]
        names = {"embedding": EMBEDDING, "head": "lm_head.weight"}
        tensors |= {names[end]: embedding * factor for end, factor in factors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return make


GPT2 = renamed("gpt2", ("transformer.", ""))
THIRD_PARTY = {
    "without a prefix": GPT2,
    "old names": renamed("bert", ("Norm.weight", "Norm.gamma"), ("Norm.bias", "Norm.beta")),
    "as in the class": as_its_class,
    "experts of one tensor in several dtypes": in_several_dtypes,
    "tied, head alone": tied(head=1.0),
    "tied, both": tied(embedding=1.0, head=1.0),
    "tied, but not the same": tied(embedding=1.0, head=2.0),  # transformers does not tie these
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", THIRD_PARTY.values(), ids=THIRD_PARTY)
def test_third_party_files(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder)
    found, expected = lent(folder, torch.float64), loaded(folder, torch.float64)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert growkit.verify(folder, folder, **QUICK)["kept"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "deepseek_v3", "gpt2"])
def test_no_model_is_loaded_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    GPT2(folder) if kind == "gpt2" else save(kind, folder)
    fail = lambda *_, **options: pytest.fail("whole")  # noqa: E731
    monkeypatch.setattr("transformers.modeling_utils.safe_open", fail)
    with pytest.raises(pytest.fail.Exception, match="whole"):  # the control
        AutoModelForCausalLM.from_pretrained(folder)
    assert growkit.verify(folder, folder, **QUICK)["kept"]


def test_experts_in_the_file_twice_or_missing_are_refused(tmp_path: Path) -> None:
    """Which of two transformers reads, names decide; a missing one is no random one."""
    folder = save("mixtral", tmp_path / "model")
    with strict_float64():  # dtypes are those of the files all the same
        _, weights, _ = empty_model(Checkpoint(folder), torch.float64)
    assert all(weights.read(name).dtype == torch.float32 for name in weights.tensors)
    name = "model.layers.0.mlp.experts.down_proj"
    with edit_weights(folder) as tensors:
        tensors[name] = 2 * loaded(folder, torch.float32)[name]
    with pytest.raises(InputError, match=r"experts\.0\.w2\.weight and .*experts\.down_proj"):
        growkit.verify(folder, folder, **QUICK)
    with edit_weights(folder) as tensors:
        del tensors[name], tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        growkit.verify(folder, folder, **QUICK)


@pytest.mark.sampled(1, "as saved-deepseek_v3")
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("renamed", [False, True], ids=["as saved", "as in the class"])
def test_the_bias_of_experts_in_a_buffer(kind: str, renamed: bool, tmp_path: Path) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    source = save(kind, tmp_path / "source")
    target = shutil.copytree(source, tmp_path / "target")
    if renamed:
        tensors = AutoModelForCausalLM.from_pretrained(source).state_dict()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert growkit.verify(source, target, **QUICK)["kept"]
    with edit_weights(target) as tensors:
        name = max(name for name in tensors if name.endswith("e_score_correction_bias"))
        tensors[name] += torch.linspace(0, 5, len(tensors[name]))
    found = growkit.verify(source, target, **QUICK)
    assert not found["kept"]
    assert name in found["reason"]
    assert found.sections.logits.strict_float64.relative > 0.01
