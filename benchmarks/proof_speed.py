"""Speed of the proof, against the same work by hand.

    python benchmarks/proof_speed.py [--pairs 5] [--folder FOLDER]

By hand: both models are loaded with transformers, in float64 and then in the storage dtype, run on
the same tokens, and what verify prints of the logits is taken: largest difference, scale, KL, top-1
agreement, losses.

Everything by hand: besides, what else `growkit verify` reports. Every weight is compared with its
copies, both models run in four more ways in both dtypes, a fault is put into a matrix, the
gradients of copies are compared, and the source's rounding is measured.

A random float32 Llama (hidden 1024, ffn 2816, 3 layers, 16 heads, vocabulary 8000) is grown by two.
All run in turn, as processes of their own; ratios are taken run by run. Needs 2 GB of disk and 6 GB
of memory, and prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from measuring import by_name, growkit, head, in_turn, machine, make_llama, ratio, row, run

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS, LENGTH = 8, 512  # what `growkit verify` does by default
SOME, SHORT = 128, 48  # tokens on which it does what else it does


SIZES = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
}


def by_hand(source: Path, target: Path, everything: bool) -> None:
    """What growkit is not used for: nothing but transformers and torch."""
    import torch
    from torch.nn.functional import cross_entropy, kl_div
    from transformers import AutoModelForCausalLM

    ids = torch.randint(8000, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))
    largest = scale = kl = agreeing = losses = rounding = 0.0
    exact: list[torch.Tensor] = []
    for dtype in (torch.float64, torch.float32):
        first = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        second = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        for index, prompt in enumerate(ids):
            with torch.no_grad():
                one, other = (model(prompt[None]).logits[0].double() for model in (first, second))
            largest = max(largest, float((one - other).abs().max()))
            scale += float(one.square().mean())
            log_p, log_q = one.log_softmax(-1), other.log_softmax(-1)
            kl += float(kl_div(log_q, log_p, log_target=True, reduction="sum"))
            agreeing += float((one.argmax(-1) == other.argmax(-1)).sum())
            losses += sum(float(cross_entropy(each[:-1], prompt[1:])) for each in (one, other))
            if everything and dtype is torch.float64:
                exact.append(one[:: LENGTH // SOME].clone())
            elif everything:
                rounding = max(rounding, float((exact[index] - one[:: LENGTH // SOME]).abs().max()))
        if everything:
            print(other_ways(first, second, ids[0, :SHORT]))
        if everything and dtype is torch.float64:
            print(weights_and_gradients(first, second, ids[0, :SOME]))
    print(largest, scale, kl, agreeing, losses, rounding)


def other_ways(source: Any, target: Any, prompt: Tensor) -> list[float]:
    """Largest differences when they decode from the cache, are padded, and get positions."""
    import torch

    def decoded(model: Any) -> Tensor:
        first = model(prompt[None, :-4], use_cache=True)
        logits, cache = [first.logits], first.cache
        for part in prompt[-4:].split([1, 1, 2]):
            logits.append(model(part[None], cache=cache, use_cache=True).logits)
        return torch.cat(logits, 1)

    def padded(model: Any) -> Tensor:
        mask = torch.tensor([[0] * 5 + [1] * len(prompt)])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        tokens = torch.cat([prompt.new_zeros(5), prompt])[None]
        return model(tokens, attention_mask=mask, position_ids=positions).logits[:, 5:]

    def placed(positions: Tensor) -> Callable[[Any], Tensor]:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        return lambda model: (
            model(prompt[None], attention_mask=mask, position_ids=positions[None]).logits
        )

    far = torch.linspace(0, 2047, len(prompt)).long()
    ways = (decoded, padded, placed(torch.arange(7, 7 + len(prompt))), placed(far))
    with torch.no_grad():
        return [float((way(source) - way(target)).abs().max()) for way in ways]


def weights_and_gradients(source: Any, target: Any, prompt: Tensor) -> list[float]:
    """How far copies are from their weights, and their gradients apart; what a fault does."""
    import torch
    from torch.nn.functional import cross_entropy

    weights = dict(source.named_parameters())
    lost = 0.0
    for name, weight in target.named_parameters():
        (rows, *columns), one = weight.shape, weights[name].detach()
        parts = weight.detach().unflatten(0, (rows // len(one), len(one)))
        if columns:
            columns = [columns[0] // one.shape[1], one.shape[1]]
            parts = parts.unflatten(2, columns).sum(2) / (columns[0] if "embed" in name else 1)
        lost = max(lost, float((parts - one).abs().max()))
    logits = target(prompt[None]).logits[0]
    cross_entropy(logits[:-1], prompt[1:]).backward()
    apart = []
    for name, weight in target.named_parameters():
        copies = weight.grad.unflatten(0, (-1, len(weights[name])))
        if len(copies) > 1:
            apart.append(float((copies[0] - copies[1]).abs().median()))
    layer = target.model.layers[len(target.model.layers) // 2]
    matrix = max(layer.parameters(), key=lambda each: float(each.detach().norm()))
    with torch.no_grad():
        matrix *= 1.001
        changed = float((target(prompt[None]).logits[0] - logits).abs().max())
    return [lost, min(apart), changed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--by-hand", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--everything", nargs=2, type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if given := chosen.by_hand or chosen.everything:
        by_hand(*given, chosen.everything is not None)
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        pair = Path(scratch) / "source", Path(scratch) / "target"
        make_llama(pair[0], **SIZES)
        growkit("grow", *pair, "--hidden", "x2", "--no-verify")
        amount = ("--prompts", PROMPTS, "--length", LENGTH, "--device", "cpu")
        calls = {
            "by hand": lambda: run(sys.executable, __file__, "--by-hand", *pair),
            "everything by hand": lambda: run(sys.executable, __file__, "--everything", *pair),
            "`growkit verify`": lambda: growkit("verify", *pair, *amount),
        }
        runs = in_turn(calls, chosen.pairs)
    print(f"{machine()}; {PROMPTS} prompts of {LENGTH} tokens, medians of {chosen.pairs} rounds")
    print(head("", "seconds", "times by hand", "times everything by hand", "peak memory, GB"))
    seconds = {name: by_name(each, "seconds") for name, each in runs.items()}
    for name, each in seconds.items():
        ratios = (ratio(each, seconds[other]) for other in ("by hand", "everything by hand"))
        figures = f"{median(each):.1f}", *(f"{one:.2f}" for one in ratios)
        print(row(name, *figures, f"{max(by_name(runs[name], 'peak')) / 1e9:.2f}"))


if __name__ == "__main__":
    main()
