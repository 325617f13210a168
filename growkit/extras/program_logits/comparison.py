"""The logits of a program, and those of the source's class in strict float64 and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from math import gcd, inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from growkit.base.errors import InputError
from growkit.base.progress import steps
from growkit.engine.calls import Call, CallError
from growkit.engine.class_weights import class_weights
from growkit.engine.device import CPU
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.metrics import LOGITS_AT_ONCE, Head
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import resolved, tokens_of
from growkit.extras.program_logits.guesses import (
    Edited,
    Guess,
    guess_of_value,
    guesses_of_conventions,
    guesses_of_forms,
    guesses_of_settings,
    guesses_of_tokens,
    guesses_of_windows,
    numbers_in,
)
from growkit.extras.program_logits.logits_file import Columns, LogitsFile
from growkit.extras.program_logits.value_search import closest_value
from growkit.extras.spool import Spool
from growkit.model.checkpoint.reading import Checkpoint

NOTHING = Guess("", "")
"""No mistake: what the source's class computes."""

BLOCK, LARGEST = 256, 127
"""Longest block of numbers with a scale, and the largest of its whole numbers."""

LEAST_SCALE = 1e-3
"""Least difference of a factor of logits from 1."""

FITTED_TOKENS = 64
"""Number of positions that decide between values of a setting, as there are many of them."""

Look = Callable[[int, Stage], None]
"""Looks at a stage, with the number of its states in the file."""

Logs = Callable[[int, slice], tuple[Tensor, Columns]]
"""Log-probabilities at some rows of a sequence, [rows, columns]; see ``LogitsFile``."""


@dataclass
class Errors:
    """Distance of log-probabilities from those of the source's class in strict float64.

    Attributes:
        kl: KL of every position to second order, [sequences · rows], in nats; NaN for a position
            that the guess does not have.
        largest: largest difference of a log-probability; NaN if it is not a number.
        squares: sum of the squared logits in strict float64.
        elements: their number.
    """

    kl: Tensor
    largest: float = 0.0
    squares: float = 0.0
    elements: int = 0

    @property
    def scale(self) -> float:
        """Root mean square of the logits in strict float64."""
        return float((self.squares / max(self.elements, 1)) ** 0.5)

    @property
    def mean(self) -> float:
        """Mean KL in nats per token, over the positions that the guess has."""
        return float(self.kl[~self.kl.isnan()].mean()) if not self.kl.isnan().all() else torch.nan


class StateError(NamedTuple):
    """Error of a module's output: root mean squares, relative to its scale.

    Attributes:
        module: name of the module.
        program: error of the program.
        own: error of the source's class in the program's dtype.
    """

    module: str
    program: float
    own: float


@dataclass(frozen=True)
class Run:
    """The source's class after all of its layers ran.

    Attributes:
        model: the class, in some dtype.
        ends: outputs of the last layer, by sequence, each [tokens, hidden].
        call: index of the first call, whose settings the head has.
    """

    model: Layerwise
    ends: Sequence[Tensor]
    call: int = 0

    @contextmanager
    def head(self) -> Iterator[Head]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""
        in_float64 = self.model.lender.dtype == torch.float64
        with self.model.head() as head, self.model.as_in(self.call):
            yield strict_float64()(head) if in_float64 else head


class InBlocks(TorchFunctionMode):
    """Rounds the inputs of matrices to whole numbers of 8 bits, with a scale for every block.

    llama.cpp does this where weights are quantised, in blocks of 32 or 256 numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``torch.overrides``."""
        if func is torch.nn.functional.linear:
            blocks = args[0].unflatten(-1, (-1, gcd(args[0].shape[-1], BLOCK)))
            scales = blocks.abs().amax(-1, keepdim=True).div(LARGEST).clamp(min=1e-30)
            args = ((blocks / scales).round().mul(scales).flatten(-2), *args[1:])
        return func(*args, **(kwargs or {}))


class Engine:
    """The logits of a program, and the source that they are compared with.

    Args:
        source: the source.
        file: the logits.

    Attributes:
        states: errors of the states that the file has; see ``measure_rounding``.

    Raises:
        InputError: the file has tokens that the source does not have.
    """

    def __init__(self, source: Checkpoint, file: LogitsFile) -> None:
        self.file, self._weights = file, copy(class_weights(source))
        self._weights.config = resolved(self._weights.config) or self._weights.config
        self._vocabulary = tokens_of(self._weights.config)
        file.check_tokens(self._vocabulary)
        self._sizes: dict[str, int] = {}
        with suppress(InputError):  # no family may describe the source
            self._sizes = dict(source.family.sizes(source.config))
        self._exact = {number: Spool() for number in file.hidden}
        self._strict: dict[Guess, Run] = {}
        self.states: list[StateError] = []

    @property
    def class_name(self) -> str:
        """Name of the source's class; after ``compare``."""
        return type(self._strict[NOTHING].model.model).__name__

    def compare(self) -> dict[Guess, Errors]:
        """Compare with strict float64, also with other settings and tokens; ``NOTHING`` is first.

        All of them run in one walk through the layers.

        Raises:
            InputError: the class cannot run, or the file has states of another size.
        """
        config = self._weights.config
        guesses = [NOTHING, *guesses_of_settings(config), *guesses_of_tokens(config)]
        return self._compare(guesses, self._keep)

    def compare_windows(self, first: int) -> dict[Guess, Errors]:
        """Compare with shorter windows, with which a position is the first that differs."""
        return self._compare(guesses_of_windows(self._weights.config, first))

    def fit_values(self, base: Errors, enough: float) -> dict[Guess, Errors]:
        """Compare with values of settings that come closer and closer to the program's.

        Args:
            base: errors without a guess.
            enough: KL in nats per token at which a value is found.

        Returns:
            The errors with the value that comes closest, the roundest form of it first.
        """
        numbers = numbers_in(self._weights.config)
        if not numbers:
            return {}
        tokens = int(self.file.positions.min()) + FITTED_TOKENS

        def measure(values: Mapping[str, Sequence[float]]) -> dict[str, dict[float, float]]:
            kls: dict[str, dict[float, float]] = {key: {} for key in values}
            guesses = [
                guess_of_value(key, numbers[key], value)
                for key, others in values.items()
                for value in others
            ]
            for guess, errors in self._compare(guesses, tokens=tokens).items():
                del self._strict[guess]  # the states of all of them together would be large
                for key, value in guess.settings.items():
                    kls[key][value] = errors.mean if isfinite(errors.mean) else inf
            return kls

        key, values = closest_value(measure, numbers, base.mean, enough)
        return self._compare(guess_of_value(key, numbers[key], value) for value in values)

    def _compare(
        self, guesses: Iterable[Guess], look: Look | None = None, tokens: int | None = None
    ) -> dict[Guess, Errors]:
        """Compare with strict float64 with settings and tokens, in one walk."""
        count = len(self.file.ids)
        with strict_float64():
            model = Layerwise(self._weights, torch.float64, CPU)
            possible = [guess for guess in guesses if _differs(model, guess)]
            ends: list[Tensor] = []
            while possible:
                try:
                    ends = self._walk(model, possible, look, tokens)
                    break
                except CallError as error:
                    if possible[wrong := error.call // count] is NOTHING:
                        raise
                    del possible[wrong]
        for number, guess in enumerate(possible):
            first = number * count
            self._strict[guess] = Run(model, ends[first : first + count], first)
        return {guess: self._errors(guess, self._of_program) for guess in possible}

    def compare_conventions(self) -> dict[Guess, Errors]:
        """Compare with strict float64 with other conventions, each of which needs a walk.

        Raises:
            InputError: the class cannot run.
        """
        guesses = [*guesses_of_conventions(self._weights, self._sizes)]
        with strict_float64():
            self._strict |= {guess: self._run(guess, torch.float64) for guess in guesses}
        forms, scale = [*guesses_of_forms(self.file.only_top)], self._scale()
        if abs(scale - 1) > LEAST_SCALE:
            forms.append(
                Guess(
                    f"multiplies logits by {scale:.4g}, as a temperature of {1 / scale:.3g} does",
                    "write the logits as they are before sampling",
                    scale=scale,
                )
            )
        self._strict |= dict.fromkeys(forms, self._strict[NOTHING])
        return {guess: self._errors(guess, self._of_program) for guess in (*guesses, *forms)}

    def _scale(self) -> float:
        """The factor of logits that fits the program best; 1 if none does."""
        products = squares = 0.0
        run = self._strict[NOTHING]
        with run.head() as head:
            for sequence, rows in self._pieces():
                logs, columns = self._of_program(sequence, rows)
                states = run.ends[sequence][self.file.positions[rows]]
                exact = self._at(head(states), columns, NOTHING)
                one, other = (of - of.mean(-1, keepdim=True) for of in (exact, logs))
                products, squares = (
                    products + float((one * other).sum()),
                    squares + float(one.square().sum()),
                )
        scale = products / squares if squares else 1.0
        return scale if isfinite(scale) and scale > 0 else 1.0

    def not_finite(self) -> int:
        """The number of positions at which the program gives a number that is not finite."""
        pieces = (self._of_program(*piece)[0] for piece in self._pieces())
        return sum(int((~logs.isfinite()).any(-1).sum()) for logs in pieces)

    def measure_rounding(self, guess: Guess, other: str = "") -> Errors:
        """The errors of the source's class in the program's dtype, with a guess that was compared.

        With ``NOTHING``, ``states`` then has the errors of the states in the file.

        Args:
            guess: the guess.
            other: torch name of another dtype than the program's.
        """
        look = self._compare_states if guess is NOTHING and not other else None
        in_blocks = self.file.dtype == "int8" and not other
        dtype = torch.float32 if in_blocks else getattr(torch, other or self.file.dtype)
        with InBlocks() if in_blocks else nullcontext():
            return self._rounding_of(guess, self._run(guess, dtype, look))

    def _rounding_of(self, guess: Guess, run: Run) -> Errors:
        """The errors of the source's class after it ran in the program's dtype."""
        with run.head() as head:

            def own(sequence: int, rows: slice) -> tuple[Tensor, Columns]:
                _, columns = self._of_program(sequence, rows)
                states = run.ends[sequence]
                places = (self.file.positions[rows] + guess.shift).clamp(0, len(states) - 1)
                logits = head(states[places])
                return self._at(logits, columns, guess, self.file.as_written), columns

            return self._errors(guess, own)

    def _run(self, guess: Guess, dtype: torch.dtype, look: Look | None = None) -> Run:
        """Run the class in a dtype with a guess."""
        weights = Edited(self._weights, guess.edit) if guess.edit else self._weights
        model = Layerwise(weights, dtype, CPU)
        hook = model.embedding[1].register_forward_hook(
            lambda module, args, output: output * guess.factor
        )
        try:
            return Run(model, self._walk(model, [guess], look))
        finally:
            hook.remove()

    def _walk(
        self,
        model: Layerwise,
        guesses: Sequence[Guess],
        look: Look | None = None,
        tokens: int | None = None,
    ) -> list[Tensor]:
        """Run the first tokens of every sequence with every guess; return the last states."""
        calls = [
            Call(guess.ids(ids)[:tokens], settings=guess.settings)
            for guess in guesses
            for ids in self.file.ids
        ]
        title = f"computing logits of {self.file.program} again, in {len(calls)} passes"
        with steps(title, len(model.layers) + 1) as advance:
            for number, stage in enumerate(model.stages(calls)):
                if look and number in self._exact:
                    look(number, stage)
                ends = [*stage.after]
                advance(1)
        return ends

    def _keep(self, number: int, stage: Stage) -> None:
        """Keep states of the source that the file has as well."""
        for index in range(len(self.file.ids)):
            shape, expected = self.file.states(number, index).shape, stage.after[index].shape
            if shape != expected:
                raise InputError(
                    f"hidden.{number} in {self.file.path} is {list(shape)}; {list(expected)} was "
                    f"expected, the output of {stage.name}"
                )
            if len(self._exact[number]) <= index:
                self._exact[number].append(stage.after[index])

    def _compare_states(self, number: int, stage: Stage) -> None:
        """Compare states of the program, and of the class in its dtype, with the exact ones."""
        exact = [self._exact[number][index] for index in range(len(self.file.ids))]
        program = [self.file.states(number, index) for index in range(len(exact))]
        errors = (_relative(exact, states) for states in (program, stage.after))
        self.states.append(StateError(stage.name, *errors))

    def _of_program(self, sequence: int, rows: slice) -> tuple[Tensor, Columns]:
        return self.file.log_probabilities(sequence, rows, self._vocabulary)

    def _at(
        self,
        logits: Tensor,
        columns: Columns,
        guess: Guess,
        write: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    ) -> Tensor:
        """Log-probabilities of some columns of logits, [rows, vocabulary], in float64.

        Args:
            logits: the logits.
            columns: the columns.
            guess: by its scale and form, what is written.
            write: rounds the numbers that are written.
        """
        form, logits = guess.form or (lambda logs: logs), logits * guess.scale
        if isinstance(columns, slice):
            return form(write(logits[:, columns].double()).log_softmax(-1))
        logs = logits[:, : self._vocabulary].double().log_softmax(-1)
        return write(form(logs.gather(-1, columns)))

    def _errors(self, guess: Guess, of: Logs) -> Errors:
        """Compare log-probabilities with those of the class in strict float64, with a guess."""
        errors, kl, run = Errors(torch.empty(0)), [], self._strict[guess]
        with run.head() as head:
            for sequence, rows in self._pieces():
                places = self.file.positions[rows] + guess.shift
                inside = (places >= 0) & (places < len(run.ends[sequence]))
                kl.append(torch.full((len(places),), torch.nan, dtype=torch.float64))
                if not inside.any():
                    continue
                logs, columns = of(sequence, rows)
                logits = head(run.ends[sequence][places[inside]])
                chosen = columns if isinstance(columns, slice) else columns[inside]
                expected = self._at(logits, chosen, guess)
                difference = logs[inside] - expected
                kl[-1][inside] = (expected.exp() * difference.square()).sum(-1) / 2
                largest = float(difference.abs().max())
                errors.largest = max(errors.largest, largest, key=lambda n: (n != n, n))
                errors.squares += float(logits.double().square().sum())
                errors.elements += logits.numel()
        errors.kl = torch.cat(kl)
        return errors

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        """Rows of every sequence, as many as may be in memory at once."""
        rows, at_once = len(self.file.positions), max(1, LOGITS_AT_ONCE // self._vocabulary)
        for sequence in range(len(self.file.ids)):
            for start in range(0, rows, at_once):
                yield sequence, slice(start, min(start + at_once, rows))


def _differs(model: Layerwise, guess: Guess) -> bool:
    """Whether a class can have other settings, and computes with them."""
    with suppress(InputError):
        return not guess.settings or bool(model.changed_by(guess.settings))
    return False


def _relative(exact: Sequence[Tensor], states: Sequence[Tensor]) -> float:
    """Root mean square difference of states, relative to that of the exact ones."""
    one, other = torch.cat([*exact]), torch.cat([state.double() for state in states])
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())
