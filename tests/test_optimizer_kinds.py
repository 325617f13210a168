"""States of optimizers as people make them: what is legal goes on, the rest is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from growkit.errors import InputError
from tests.conftest import folder_bytes, load_strict, save_model
from tests.optimizer_state import grown, largest, save_torch, save_universal, step, trained

LLAMA = {"num_hidden_layers": 1}
Make = Callable[[Any], torch.optim.Optimizer]
RATES = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}


def backwards(model: Any) -> torch.optim.Optimizer:
    """Groups in no order that one would guess, with names."""
    return torch.optim.AdamW(list(model.named_parameters())[::-1], **RATES)


def undecayed_first(model: Any) -> torch.optim.Optimizer:
    vectors = [each for each in model.parameters() if each.dim() < 2]
    matrices = [each for each in model.parameters() if each.dim() > 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    return torch.optim.AdamW(groups, **RATES)


def of_tensors(model: Any) -> torch.optim.Optimizer:
    rates = {key: torch.tensor(value, dtype=torch.float64) for key, value in RATES.items()}
    betas = tuple(torch.tensor(each, dtype=torch.float64) for each in (0.75, 0.5))
    made = {**RATES, "lr": rates["lr"], "betas": betas, "foreach": False}
    return torch.optim.AdamW(model.parameters(), **made)


LEGAL: dict[str, Make] = {
    "decay in the gradient": lambda model: torch.optim.Adam(model.parameters(), **RATES),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), **RATES, amsgrad=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), **RATES, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), **RATES, fused=True),
    "tensors": of_tensors,
    "names": backwards,
    "vectors first": undecayed_first,
    "each by itself": lambda model: torch.optim.AdamW(
        [{"params": [each]} for each in model.parameters()], **RATES
    ),
}


@pytest.mark.parametrize("kind", LEGAL)
def test_they_go_on_with_what_the_file_says(kind: str, tmp_path: Path) -> None:
    """Nothing is given to the grown model's optimizer but what stands in its file."""
    tied = kind in ("names", "amsgrad")
    source = save_model(
        tmp_path / "source", "llama", dtype=torch.float64, tie_word_embeddings=tied, **LLAMA
    )
    model = load_strict(source)
    optimizer = LEGAL[kind](model)
    step(model, optimizer, 0)
    model.save_pretrained(source)
    out = tmp_path / "out"
    grown(source, save_torch(model, optimizer, tmp_path / "state"), out)
    large = load_strict(out)
    content = torch.load(out / "optimizer.pt", weights_only=True)
    named = dict(large.named_parameters())
    groups = [{"params": [named[n] for n in g["param_names"]]} for g in content["param_groups"]]
    new = type(optimizer)(groups)
    new.load_state_dict(content)
    for number in (1, 2):
        step(model, optimizer, number)
        step(large, new, number)
    model.save_pretrained(source)
    grown(source, None, tmp_path / "expected")
    expected = load_strict(tmp_path / "expected").state_dict()
    assert largest(large.state_dict(), expected) < 1e-12


def test_squares_in_float16_do_not_vanish(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    _, optimizer = trained(source, 1)
    content = optimizer.state_dict()
    for kept in content["state"].values():
        kept["exp_avg_sq"] = torch.full_like(kept["exp_avg_sq"], 6e-8).half()
        kept["exp_avg"] = kept["exp_avg"].half()
    torch.save(content, tmp_path / "state.pt")
    grown(source, tmp_path / "state.pt", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert all((each["exp_avg_sq"] > 0).all() for each in written["state"].values())


def option(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["param_groups"][0].__setitem__(key, value)


ILLEGAL: dict[str, tuple[Callable[[Any], None], str]] = {
    "a rate that is none": (option("lr", float("nan")), "lr of a group"),
    "a rate in words": (option("lr", "fast"), "lr of a group"),
    "a negative eps": (option("eps", -1.0), "eps of a group"),
    "one beta": (option("betas", (0.9,)), "betas of a group"),
    "a large beta": (option("betas", (0.9, 1.0)), "betas of a group"),
    "many rates": (option("lr", torch.ones(3)), "lr of a group"),
    "a step beyond counting": (
        lambda content: content["state"][3].__setitem__("step", torch.tensor(1e30)),
        "the step of",
    ),
    "8 bits": (
        lambda content: content["state"][3].update(
            state1=torch.zeros(16, 16, dtype=torch.uint8), absmax1=torch.zeros(1)
        ),
        "another optimizer",
    ),
}


@pytest.mark.parametrize("fault", ILLEGAL)
def test_others_are_told(fault: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    spoil, said = ILLEGAL[fault]
    model = load_strict(source)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    content = optimizer.state_dict()
    spoil(content)
    torch.save(content, tmp_path / "state.pt")
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError, match=said):
        grown(source, tmp_path / "state.pt", tmp_path / "out")
    assert folder_bytes(tmp_path) == before


def test_deepspeed_has_one_step(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model, optimizer = trained(source, 1)
    state = save_universal(model, optimizer, tmp_path / "state")
    assert grown(source, state, tmp_path / "out").optimizer
    torch.save(torch.tensor(7.0), state / "zero" / "lm_head.weight" / "step.pt")
    with pytest.raises(InputError, match="after 1 steps and others after 7"):
        grown(source, state, tmp_path / "other")


def test_what_is_grown_grows_again(tmp_path: Path) -> None:
    """Groups that were taken apart list their parameters, which numbers would not tell."""
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model, optimizer = trained(source, 1)
    for save in (save_torch, save_universal):
        state = save(model, optimizer, tmp_path / save.__name__)
        out = tmp_path / f"{save.__name__}-out"
        grown(source, state, out)
        again = grown(out, out, tmp_path / "again").optimizer
        assert again
        assert (again.step, again.reset) == (1, {})
