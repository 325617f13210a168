"""The source drafts the grown model: tokens accepted, and speed, before and after training.

    python benchmarks/drafting.py TEXT SRC... [--rounds 5]

Every source is grown in several ways, as it is and after it has trained on the text itself. The
grown model generates after windows of the text's last tenth, by itself, and with its source as
transformers' ``assistant_model``, greedily and by sampling, all in float32 on one thread of a CPU.
Then it trains on the rest of the text with the rates of ``growkit.training.param_groups`` and
generates again; the source stays as it is.

Calls of both models are counted. A call of the grown model gives one token of its own, after all of
the draft that it accepts. Both ways of a round follow each other, and the figure is the median of
their ratios, as other work may run on the machine. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import head, in_turn, machine, ratio, row
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import growkit
from growkit.training import param_groups

DRAFT = 8
"""Tokens of every draft."""

PROMPTS, READ, WRITTEN = 4, 24, 96
"""Prompts, tokens of each, and tokens that are generated after each."""

LENGTH, BATCH, RATE = 128, 4, 5e-4
HELD = 32
"""Windows on which the loss is measured."""

WAYS: dict[str, dict[str, Any]] = {
    "layers x4": {"method": "depth", "layers": "x4"},
    "hidden x8": {"hidden": "x8"},
}
STEPS = (0, 20, 50, 200)
FAMILIAR = (0, 1000)
"""Steps that a source has trained on the text before it grows."""


def load(folder: Path) -> Any:
    """A model in float32, whose drafts are all of one length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = model.generation_config
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = DRAFT, 0.0
    settings.num_assistant_tokens_schedule = "constant"
    return model


@dataclass
class Pair:
    """A grown model and its source, which count their calls."""

    grown: Any
    source: Any

    def __post_init__(self) -> None:
        self.calls = Counter[str]()
        for name in ("grown", "source"):
            getattr(self, name).register_forward_pre_hook(
                lambda *_, name=name: self.calls.update([name])
            )

    def generate(self, prompts: Tensor, *, drafted: bool, sampled: bool) -> tuple[float, Tensor]:
        """Seconds, and what is written, [prompts, tokens]."""
        torch.manual_seed(0)
        more = {"assistant_model": self.source} if drafted else {}
        self.calls.clear()
        begin = time.perf_counter()
        written = [
            self.grown.generate(
                prompt[None],
                attention_mask=torch.ones(1, READ, dtype=torch.long),
                max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN,
                do_sample=sampled,
                top_k=0,
                pad_token_id=0,
                **more,
            )[0, READ:]
            for prompt in prompts
        ]
        return time.perf_counter() - begin, torch.stack(written)


def measured(pair: Pair, prompts: Tensor, rounds: int, *, sampled: bool) -> tuple[Any, ...]:
    """Accepted tokens of a draft, tokens for each call of the grown model, and speed."""
    ways = {
        way: lambda drafted=drafted: pair.generate(prompts, drafted=drafted, sampled=sampled)
        for way, drafted in (("alone", False), ("drafted", True))
    }
    found = in_turn(ways, rounds)
    seconds = {way: [second for second, _ in results] for way, results in found.items()}
    alone, drafted = (found[way][0][1] for way in ways)
    same = "" if sampled else f"{int((alone == drafted).all(1).sum())} of {len(prompts)}"
    # The last draft of each prompt ends with what is asked for.
    pair.generate(prompts, drafted=True, sampled=sampled)
    tokens, own = drafted.numel(), pair.calls["grown"]
    accepted = (tokens - own) / pair.calls["source"]
    speed = ratio(seconds["alone"], seconds["drafted"])
    rate = sorted(tokens / each for each in seconds["alone"])[rounds // 2]
    return f"{accepted:.0%}", f"{tokens / own:.2f}", same, f"{rate:.0f}", f"{speed:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    columns = ("source", "its steps", "grown by", "steps", "held out", "sampled", "accepted")
    print(machine("transformers") + head(*columns, *LAST))
    for source, steps in product(arguments.sources, FAMILIAR):
        with tempfile.TemporaryDirectory() as folder:
            for line in rows(source, steps, Path(folder), arguments.text, arguments.rounds):
                print(line, flush=True)


LAST = ("tokens per call", "same text", "tokens/s alone", "times as fast")


def trained(model: Any, windows: Tensor, steps: range, optimizer: torch.optim.Optimizer) -> None:
    """Train for some steps, whose batches follow from their numbers."""
    model.train()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def rows(source: Path, familiar: int, place: Path, text: Path, rounds: int) -> Iterator[str]:
    """The rows of one source."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    train, held = windows.split([len(windows) * 9 // 10, len(windows) - len(windows) * 9 // 10])
    prompts = held[:: len(held) // PROMPTS][:PROMPTS, :READ]
    draft, start = load(source), place / "source"
    trained(draft, train, range(familiar), torch.optim.AdamW(draft.parameters(), lr=2 * RATE))
    draft.save_pretrained(start)
    for name, options in WAYS.items():
        growkit.grow(start, place / name, verify=False, **options)
        pair = Pair(load(place / name), load(start))
        optimizer = torch.optim.AdamW(param_groups(pair.grown, place / name, lr=RATE))
        for before, steps in zip((0, *STEPS), STEPS, strict=False):
            trained(pair.grown, train, range(familiar + before, familiar + steps), optimizer)
            with torch.no_grad():
                losses = [pair.grown(each[None], labels=each[None]).loss for each in held[:HELD]]
            loss = float(torch.stack(losses).mean())
            for sampled in (False, True):
                figures = measured(pair, prompts, rounds, sampled=sampled)
                how = "yes" if sampled else "no"
                yield row(source.name, familiar, name, steps, f"{loss:.2f}", how, *figures)


if __name__ == "__main__":
    main()
