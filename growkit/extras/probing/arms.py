"""The arms of a probe: the source and the grown candidates, trained on one text."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError, PlaceError, foreign
from growkit.base.progress import Advance, current
from growkit.base.tensors import total_parameters
from growkit.engine.prompts import check_ids, documents, ids_of, load_tokenizer, read_text
from growkit.engine.transformers_class import load_model, longest_context
from growkit.extras.optimizer.param_groups import param_groups
from growkit.extras.probing import harness as harness
from growkit.extras.probing.harness import Look
from growkit.extras.probing.json_lines import Work
from growkit.extras.probing.probe_settings import Candidate, ProbeSettings
from growkit.extras.probing.ranking import Arm, new_arm
from growkit.model.checkpoint.publishing import is_untouched
from growkit.model.checkpoint.reading import Checkpoint
from growkit.pipeline.running import run
from growkit.planning.own_class import substitute
from growkit.planning.recipe import Recipe

BETAS = (0.9, 0.95)
"""Betas of AdamW."""

MAX_TEXT = 1 << 27
"""Largest number of bytes read of a text."""

MOST, FEW, FEWEST = 64, 16, 8
"""Numbers of held-out windows: the most, the number for a short training, and the fewest."""

SHARE = 16
"""Training windows for each held-out window, so that measuring costs less than training."""

LOOKS, EARLY = 8, 4
"""Measurements of the loss: over a whole training, and up to equal compute."""

NOTED = ("outcome", "reason", "promise", "parameters", "step_flops")
"""Fields of a grown candidate in the journal."""


@dataclass(frozen=True)
class Data:
    """Windows of a text.

    Attributes:
        training: training windows, [windows, length]; they do not overlap.
        held_out: windows for measuring the loss, [windows, length], from the text's last tenth.
        sha256: SHA-256 of the part of the text that was read.
        cut: whether only the beginning of the text was read.
    """

    training: Tensor
    held_out: Tensor
    sha256: str
    cut: bool

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the result on the text."""
        return {
            "length": self.training.shape[1],
            "text_sha256": self.sha256,
            "training_tokens": self.training.numel(),
            "held_out_tokens": self.held_out.numel(),
        }


def make_data(text: str | Path, folder: Path, config: Any, settings: ProbeSettings) -> Data:
    """Tokenize a text into windows.

    Documents are taken in a random order. A long text is tokenized only as far as all seeds
    together need.

    Args:
        text: a UTF-8 file.
        folder: the folder of the tokenizer.
        config: config of the source, with its vocabulary and longest context.
        settings: settings that determine the number of windows.

    Raises:
        InputError: the text cannot be read or is too short; or the tokenizer is missing or belongs
            to another model.
    """
    longest = longest_context(config)
    length = min(settings.length, longest) if isinstance(longest, int) else settings.length
    content = read_text(str(text), MAX_TEXT)
    decoded = content.decode("utf-8")
    cut = len(decoded) * 9 // 10
    tokenizer = load_tokenizer(folder)
    taken = settings.steps * settings.batch
    windows = _windows(tokenizer, decoded[:cut], length, taken * settings.seeds)
    limit = max(FEW, min(MOST, taken // SHARE))
    held_out = _windows(tokenizer, decoded[cut:], length, limit, spread=True)
    if len(held_out) < FEWEST or len(windows) < settings.batch:
        raise InputError(
            f"text {text} has too few windows of {length} tokens: {len(windows)} to train on and, "
            f"in its last tenth, {len(held_out)} to hold out; at least {settings.batch} and "
            f"{FEWEST} are needed, give a longer text or a smaller --length or --batch"
        )
    check_ids((windows, held_out), config, folder, text)
    shortened = Path(text).stat().st_size > MAX_TEXT
    return Data(windows, held_out, hashlib.sha256(content).hexdigest(), shortened)


def _windows(
    tokenizer: Any, text: str, length: int, max_count: int, *, spread: bool = False
) -> Tensor:
    """Tokenize documents one after another into windows, [windows, length].

    Args:
        tokenizer: tokenizer of the model.
        text: text with the documents.
        length: tokens per window.
        max_count: largest number of windows.
        spread: whether to take a part of as many documents as possible.
    """
    parts = documents(text.encode())
    per_document = max(FEWEST, -(-max_count // max(len(parts), 1))) if spread else max_count
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    ids: list[int] = []
    for number in order.tolist():
        ids += ids_of(tokenizer, parts[number])[: per_document * length]
        if len(ids) >= max_count * length:
            break
    count = min(len(ids) // length, max_count)
    return torch.tensor(ids[: count * length], dtype=torch.long).view(count, length)


@dataclass(frozen=True)
class Bench:
    """Makes arms and trains them under the same conditions.

    Attributes:
        work: folder of the grown models and of the journal.
        data: windows for training and measuring.
        settings: settings of the training.
        device: device of the training.
    """

    work: Work
    data: Data
    settings: ProbeSettings
    device: torch.device

    @property
    def dtype(self) -> str:
        """Torch name of the dtype of computation."""
        return self.settings.dtype or ("bfloat16" if self.device.type != "cpu" else "float32")

    def source(self, name: str, model: Checkpoint) -> Arm:
        """Make the arm of the source.

        Raises:
            InputError: it cannot be trained.
        """
        arm = new_arm(name)
        arm.stored, arm.entry.parameters = model, total_parameters(model.tensors)
        self._count(arm)
        return arm

    def grown(self, candidate: Candidate) -> Arm:
        """Make the arm of a candidate; grow and prove it unless the journal records this.

        Raises:
            InputError: an earlier grown model was changed, or the disk cannot be written to.
        """
        arm, folder = new_arm(candidate.name, candidate), self.work.folder / candidate.folder
        line = self.work.find(grown=arm.key)
        if line is None:
            self._grow(arm, candidate.recipe, folder)
            self.work.note({"grown": arm.key, **{name: arm.entry[name] for name in NOTED}})
        else:
            arm.entry |= {name: line[name] for name in NOTED}
            if arm.entry.outcome == "ranked" and not is_untouched(folder):
                raise InputError(
                    f"{folder} has been changed since it was grown; choose another --work, and "
                    "begin again"
                )
        arm.stored = folder if arm.entry.outcome == "ranked" else None
        return arm

    def _grow(self, arm: Arm, recipe: Recipe, folder: Path) -> None:
        arm.stored = folder
        recipe = replace(recipe, output=str(folder), optimizer=None)  # the source has no state
        try:
            result = run(recipe, overwrite=True, progress=current())
            arm.entry.promise, arm.entry.parameters = result.promise, result.parameters
            if result.kept is False:
                assert result.verification
                arm.entry.outcome, arm.entry.reason = "broken", result.verification.reason
            elif substitute(Checkpoint(folder).config):
                arm.refuse(
                    "transformers has no class for its layout, so it cannot be trained as it is; "
                    "end the recipe with 'convert: diff-transformer'"
                )
            else:
                self._count(arm)
        except PlaceError:
            raise  # with more room, it can be grown after all
        except InputError as error:
            arm.refuse(str(error))

    def _count(self, arm: Arm) -> None:
        assert arm.stored is not None
        with trainable(arm.entry.name, self.device):
            flops = harness.flops_of(arm.stored, self.data.training[0], self.device)
        arm.entry.step_flops = self.settings.batch * flops

    def train(self, arms: Sequence[Arm], advance: Advance) -> None:
        """Train every arm with every rate and seed, except for trainings in the journal.

        Args:
            arms: the arms; one that cannot be trained becomes ``refused``.
            advance: called with the number of completed floating-point operations.

        Raises:
            InputError: the source cannot be trained.
        """
        least = min(arm.step_flops for arm in arms)
        for arm in arms:
            looks = self._looks(least / arm.step_flops)
            try:
                for rate, seed in product(self.settings.lr, range(self.settings.seeds)):
                    arm.runs[rate, seed] = self._trained(arm, rate, seed, looks, advance)
            except InputError as error:
                if arm.candidate is None:
                    raise
                arm.refuse(str(error))

    def _looks(self, share: float) -> set[int]:
        """Choose the steps after which the loss is measured: overall, and up to equal compute.

        Args:
            share: share of all steps at which equal compute is reached.
        """
        steps = self.settings.steps
        equal = steps * share
        overall = {round(number * steps / LOOKS) for number in range(LOOKS + 1)}
        early = {round(number * equal / EARLY) for number in range(EARLY)}
        return overall | early | {int(equal), min(int(equal) + 1, steps)}

    def _trained(
        self, arm: Arm, rate: float, seed: int, looks: Collection[int], advance: Advance
    ) -> list[Look]:
        key = {"trained": arm.key, "lr": rate, "seed": seed}
        left, cost = self.settings.steps, arm.step_flops
        if line := self.work.find(**key):
            measured = [Look(*entry) for entry in line["looks"]]
        else:
            measured = self._run(arm, rate, seed, looks, lambda count: advance(count * cost))
            self.work.note({**key, "looks": [[look.step, look.losses] for look in measured]})
            left -= measured[-1].step
        advance(left * cost)
        return measured

    def _run(
        self, arm: Arm, rate: float, seed: int, looks: Collection[int], advance: Advance
    ) -> list[Look]:
        """Train an arm; stop early if a loss is not finite."""
        size, data, settings = self.settings.batch, self.data, self.settings
        assert arm.stored is not None
        with (
            trainable(arm.entry.name, self.device),
            harness.isolated(self.device, seed),
        ):
            model: Any = load_model(arm.stored, torch.float32, self.device, None)
            law = arm.stored if isinstance(arm.stored, Path) else None
            groups = param_groups(model, law, lr=rate, weight_decay=settings.weight_decay)
            return harness.train(
                model,
                torch.optim.AdamW(groups, betas=BETAS),
                range(settings.steps),
                looks,
                lambda step: harness.warmed(step, settings.warmup),
                lambda step: harness.batch_of(data.training, seed, step * size, size),
                lambda: harness.window_losses(model, data.held_out, size, self.dtype),
                self.dtype,
                advance,
            )


@contextmanager
def trainable(name: str, device: torch.device) -> Iterator[None]:
    """Report any error in this context as a model that cannot be trained.

    Raises:
        InputError: replaces the error and gives its reason.
    """
    failure = f"{name} cannot be trained"
    try:
        with foreign(failure, "leave it out, and try its output by itself"):
            yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{failure}: {device} has no room for it; give a smaller --batch or --length"
        ) from error
