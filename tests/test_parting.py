"""Ways in which copies part, beside random splits: uneven shares, and moments that begin anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growkit
from growkit.algebra.axes import Role
from growkit.algebra.expansion import IndexMap, in_blocks
from growkit.algebra.law import grow_slice, undo
from growkit.algebra.splits import Shares
from growkit.engine.strict import strict_float64
from growkit.training import param_groups, rewarming
from tests.conftest import load_strict

Make = Callable[..., Path]
MULTI_HEAD = {"num_key_value_heads": 4}
RATE = 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_uneven_splits_are_exact(parts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(parts)
    weight = (torch.randn(7, 5, generator=generator) * 2.0 ** torch.arange(-20, 15, 7)).to(dtype)
    grown = in_blocks(5, parts)
    rows, columns = in_blocks(7, 2), grown
    for uneven in (True, False):
        maps = (
            IndexMap(Role.WRITTEN, 7, rows.source, rows.share),
            IndexMap(Role.READ, 5, columns.source, columns.share, uneven=uneven),
        )
        found = grow_slice(
            lambda chosen, some=None: weight[chosen][:, some or slice(None)],
            maps,
            "name",
            Shares(None),
            [slice(0, 14), slice(0, 5 * parts)],
        )
        split = found[:7].view(7, parts, 5)
        assert split.double().sum(1).equal(weight.double())
        back = undo(lambda chosen, of=found: of[chosen], maps, slice(0, 7))
        assert back is not None
        assert back.equal(weight)
        large = (split.double() / weight.double()[:, None])[..., -2:]  # small ones have few digits
        wanted = torch.from_numpy(maps[1].shares.reshape(parts, 5)[:, :2].copy())
        assert torch.allclose(large, wanted.expand(7, -1, 2), rtol=0.02)
        assert bool(large[:, 0].ne(large[:, -1]).any()) == (uneven or parts in (3, 5))


@pytest.mark.parametrize(
    ("kind", "options", "config"),
    [
        ("llama", {"hidden": "x2"}, {"tie_word_embeddings": True}),
        ("llama", {"hidden": "x3", "ffn": "50"}, {"attention_bias": True}),
        ("diffllama", {"method": "group-diff", "hidden": "x2", "signal_heads": "x4"}, MULTI_HEAD),
    ],
    ids=str,
)
def test_uneven_copies_compute_the_same(
    kind: str, options: dict[str, Any], config: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    source = make(kind, **config)
    growkit.grow(source, tmp_path / "out", symmetry="uneven", verify=False, **options)
    result = growkit.verify(source, tmp_path / "out", prompts=1, length=16)
    assert result["kept"]
    assert result["promise"] == "exact"
    assert result["trainability"]["trainable"]


def trained(folder: Path, groups: Any, state: Path | None, steps: int) -> tuple[Any, Any]:
    """A model after some steps in strict float64, and its optimizer."""
    model = load_strict(folder)
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, eps=1e-12)
    if state:
        optimizer.load_state_dict(torch.load(state, weights_only=True))
    generator = torch.Generator().manual_seed(steps)
    for ids in torch.randint(29, (steps, 4, 16), generator=generator):
        optimizer.zero_grad()
        with strict_float64():
            model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


def apart(model: Any) -> float:
    """How far copies of MLP rows are apart in what they make of the same, in the last layer."""
    weight = model.model.layers[-1].mlp.up_proj.weight.detach().unflatten(0, (2, -1))
    one, other = weight.unflatten(2, (2, -1)).sum(2).unbind()
    return float((one - other).abs().max() / weight.abs().max())


def test_moments_of_copies_that_begin_anew_let_even_copies_part(make: Make, tmp_path: Path) -> None:
    source, before = tmp_path / "trained", make("llama", dtype=torch.float64, **MULTI_HEAD)
    model, optimizer = trained(before, lambda model: list(model.parameters()), None, 3)
    model.save_pretrained(source)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    moments, parted = {}, {}
    for name in ("copy", "reset"):
        folder = tmp_path / name
        growkit.grow(
            source,
            folder,
            hidden="x2",
            symmetry="keep",
            moments=name,
            optimizer=source / "optimizer.pt",
            verify=False,
        )

        def groups(model: Any, folder: Path = folder) -> Any:
            return param_groups(model, folder, lr=RATE, eps=1e-12, decays=lambda *_: True)

        model, optimizer = trained(folder, groups, folder / "optimizer.pt", 0)
        moments[name] = {n: optimizer.state[p] for n, p in model.named_parameters()}
        model, _ = trained(folder, groups, folder / "optimizer.pt", 4)
        parted[name] = apart(model)
    assert parted["copy"] < 1e-12
    assert parted["reset"] > 1e-3
    for name, copied in moments["copy"].items():
        reset = moments["reset"][name]
        assert reset["step"] == copied["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            kept, expected = reset[key].clone(), copied[key]
            first = first_copies(name, kept)
            assert kept[first].equal(expected[first]), name
            assert expected.count_nonzero() > 0.9 * first.sum()
            kept[first] = 0
            assert not kept.any(), name


def first_copies(name: str, tensor: Tensor) -> Tensor:
    """Where the first copies of everything but the vocabulary stand, twice as wide.

    Copies of heads stand beside them, all others in blocks.
    """
    first = torch.ones_like(tensor, dtype=torch.bool)
    heads = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    of_heads = next((at for module, at in heads.items() if module in name), None)
    for position, size in enumerate(tensor.shape):
        number = torch.arange(size)
        is_first = number // 4 % 2 == 0 if position == of_heads else number < size // 2
        shape = [-1 if other == position else 1 for other in range(tensor.dim())]
        first &= (is_first | (size == 29)).view(shape)
    return first


def test_uneven_copies_part_in_training(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float64, **MULTI_HEAD)
    parted = {}
    for symmetry in ("uneven", "keep"):
        folder = tmp_path / symmetry
        growkit.grow(source, folder, hidden="x2", symmetry=symmetry, verify=False)

        def groups(model: Any, folder: Path = folder) -> Any:
            return param_groups(model, folder, lr=RATE, eps=1e-12, decays=lambda *_: True)

        assert apart(trained(folder, groups, None, 0)[0]) < 1e-12
        parted[symmetry] = apart(trained(folder, groups, None, 10)[0])
    assert parted["keep"] < 1e-11
    assert parted["uneven"] > 1e-4


def test_a_rate_is_warmed_up_again() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": [each], "lr": 0.5} for each in model.parameters()])
    halves = rewarming(4, start=0.5, then=lambda step: 0.5 ** (step // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == rates[-1]
        optimizer.step()
        schedule.step()
    assert rates == [0.3125, 0.375, 0.4375, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]
    assert [rewarming(2)(step) for step in range(3)] == [0.5, 1.0, 1.0]
    with pytest.raises(growkit.InputError, match="re-warming for 0 steps"):
        rewarming(0)
    with pytest.raises(growkit.InputError, match=r"begin at 1\.5 of the rate"):
        rewarming(3, start=1.5)
