"""What the logits of programs say: rounding, a wrong setting, or a fault from some layer on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.limits import (
    ENGINE_MARGIN,
    NATIVE_MARGIN,
    SPACING,
    STANDARD_ERRORS,
    Limit,
    native_limit,
    within,
)
from growkit.engine.metrics import finite
from growkit.extras.program_logits.comparison import NOTHING, Engine, Errors, StateError
from growkit.extras.program_logits.guesses import Guess
from growkit.extras.program_logits.logits_file import LogitsFile
from growkit.extras.program_logits.results.engine_result import (
    EngineProgram,
    EngineSection,
    TriedGuess,
)
from growkit.model.checkpoint.reading import Checkpoint
from growkit.proof.rounding import MIN_TOKENS, SMALLEST, Inflation, inflation
from growkit.results.proof_result import Finding, LayerError, counted

GAIN = 0.1
"""Least part of the rounding error by which a guess must be nearer to the program, if rounding may
explain its logits without it: less does not matter."""

BESIDE = 0.01
"""Largest part of a mistake's KL that rounding may leave which is wider than the file says."""

FAR = 100
"""KL of a position that differs, over the largest of the source's class in the program's dtype."""

UNEXPLAINED = 0.05
"""Largest part of the KL that may be left with a value of a setting that was searched."""

MAX_NAMED = 3
"""Largest number of mistakes in a sentence that these logits do not tell apart."""

STRICT = Limit(0.0, "")


class Judge:
    """Decides whether rounding explains errors.

    Args:
        own: errors of the source's class in the program's dtype.
        dtype: torch name of the dtype.
        file: the logits.
    """

    def __init__(self, own: Errors, dtype: str, file: LogitsFile) -> None:
        self.own, self._dtype = own, dtype
        limit = native_limit(own.largest / own.scale, dtype, STRICT) if own.scale else None
        self.tolerance = limit and limit.largest
        self._narrow = SPACING[dtype] > SPACING["float32"]
        self._coarse = self._narrow or file.spacing(own.scale) > NATIVE_MARGIN * SPACING["float32"]
        self._floor = (SMALLEST * SPACING[dtype] * own.scale) ** 2

    @property
    def usable(self) -> bool:
        """Whether the class itself computes numbers in the dtype that can be compared."""
        enough = self._coarse and len(self.own.kl) >= MIN_TOKENS
        return math.isfinite(self.own.mean) and (enough or self.tolerance is not None)

    def inflation(self, errors: Errors) -> Inflation | None:
        """Rounding errors over those of the class; None for few positions.

        It is also None in float32, where they depend on the order of sums, unless the numbers of
        the file are rounded by more.
        """
        known = ~(errors.kl + self.own.kl).isnan()
        if not self._coarse or int(known.sum()) < MIN_TOKENS:
            return None
        own, program = (of.kl[known] + self._floor for of in (self.own, errors))
        return inflation(own, program, ENGINE_MARGIN)

    def explains(self, errors: Errors) -> bool:
        """Whether rounding explains errors."""
        ratio = self.inflation(errors)
        relative = errors.largest / self.own.scale
        return within(relative, self.tolerance) and (ratio is None or within(*ratio))

    def prefers(self, errors: Errors, base: Errors) -> bool:
        """Whether a guess is nearer to a program whose logits rounding explains without it."""
        gain = base.kl - errors.kl
        gain = gain[~gain.isnan()]
        if len(gain) < MIN_TOKENS:
            return False
        mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
        return mean > STANDARD_ERRORS * error and mean > GAIN * self.own.mean

    def first_layer(self, states: Sequence[StateError]) -> str | None:
        """The first module whose output differs by more than rounding; None if none does."""
        margin = ENGINE_MARGIN**0.5 if self._narrow else NATIVE_MARGIN
        limits = ((state, margin * max(state.own, SPACING[self._dtype] / 4)) for state in states)
        return next((s.module for s, limit in limits if not within(s.program, limit)), None)


def compare_engines(source: Checkpoint, paths: Sequence[Path]) -> EngineSection:
    """Compare logits that programs wrote with those of the source in strict float64.

    Args:
        source: the source.
        paths: a file for each program; see ``LogitsFile``.

    Raises:
        InputError: a file cannot be compared with the source, or with the other files.
    """
    files = [LogitsFile(path) for path in paths]
    for file in files[1:]:
        if not (file.ids.equal(files[0].ids) and file.positions.equal(files[0].positions)):
            raise InputError(
                f"{file.path} and {files[0].path} have other ids or positions; give both programs "
                "the same tokens, or compare them one after the other"
            )
    judged = [_judge(source, file) for file in files]
    section = EngineSection(
        findings=[finding for _, finding, _ in judged],
        notes=[*dict.fromkeys(note for file in files for note in _notes(source, file))],
        programs=[program for program, _, _ in judged],
    )
    if len(judged) > 1 and len({file.columns for file in files}) == 1:
        finding = _nearest([(program.program, errors) for program, _, errors in judged])
        section.nearest = finding.place
        section.findings.append(finding)
    return section


def _judge(source: Checkpoint, file: LogitsFile) -> tuple[EngineProgram, Finding, Errors]:
    """Judge one program; return its figures, the finding, and its errors."""
    engine = Engine(source, file)
    errors = engine.compare()
    base, judge = errors[NOTHING], Judge(engine.measure_rounding(NOTHING), file.dtype, file)
    if not judge.usable:
        raise InputError(
            f"in {file.dtype} the model in {source.folder} itself computes no usable logits; "
            f"compare with logits of a wider dtype than those in {file.path}"
        )
    causes = _causes(engine, judge, errors)
    if not causes and not judge.explains(base):
        errors |= engine.compare_conventions()
        causes = _causes(engine, judge, errors) or _fitted(engine, judge, errors)
        causes = causes or _narrower(engine, errors)
    kept = not causes and judge.explains(base)
    states = engine.states
    first, ratio = judge.first_layer(states), judge.inflation(base)
    nearest = sorted(errors.keys() - {NOTHING}, key=lambda guess: _order(errors[guess].mean))
    modules = [state.module for state in states]
    program = EngineProgram(
        program=file.program,
        file=str(file.path),
        sha256=file.sha256,
        dtype=file.dtype,
        positions=len(base.kl),
        columns=file.columns,
        verdict="rounding" if kept else "setting" if causes else "fault",
        cause=" or ".join(guess.phrase for guess in causes[:MAX_NAMED]) or None,
        relative=finite(base.largest / judge.own.scale),
        tolerance=judge.tolerance,
        kl_nats_per_token=finite(base.mean),
        own_kl_nats_per_token=finite(judge.own.mean),
        inflation=ratio and finite(ratio.ratio),
        inflation_limit=ratio and finite(ratio.limit),
        first_differing_layer=file.hidden[modules.index(first)] - 1 if first else None,
        by_layer=[LayerError(module=s.module, relative=finite(s.program)) for s in states],
        tried=[
            TriedGuess(guess=guess.phrase, kl_nats_per_token=finite(errors[guess].mean))
            for guess in nearest
        ],
    )
    written = f", rounded to {to} as in the file," if (to := file.rounded_to) else ""
    if to == file.dtype and not file.only_top:
        written = ""
    finding = _finding(program, first, causes[:1], errors, engine.class_name, written)
    if lost := engine.not_finite():
        where = f"at {lost} of {len(base.kl)} positions"
        finding.sentence = f"{file.program} gives numbers that are not finite {where}"
        finding.advice = "write logits as they are before tokens are masked or chosen"
    return program, finding, base


def _fitted(engine: Engine, judge: Judge, errors: dict[Guess, Errors]) -> list[Guess]:
    """Another value of a setting than the usual ones, if it explains the logits.

    It must leave little of their KL: with a value of its own, a setting always explains a part.

    Args:
        engine: the logits.
        judge: for the class in the program's dtype.
        errors: receives the errors with the value.
    """
    base = errors[NOTHING]
    if not math.isfinite(base.mean):
        return []
    different = base.kl > FAR * float(judge.own.kl.nan_to_num().max())
    first = engine.file.positions.repeat(len(engine.file.ids))[different].tolist()
    for search in (
        partial(engine.compare_windows, min(first, default=0)),
        partial(engine.fit_values, base, judge.own.mean),
    ):
        values = {guess: of for guess, of in search().items() if of.mean < UNEXPLAINED * base.mean}
        causes = _causes(engine, judge, {NOTHING: base, **values})[:1]
        if causes:
            errors |= {guess: values[guess] for guess in causes}
            return causes
    return []


def _narrower(engine: Engine, errors: dict[Guess, Errors]) -> list[Guess]:
    """What explains the logits if the program rounds more than the dtype in its file does.

    It is a mistake beside which that rounding is small, or the rounding alone: of a narrower dtype,
    or less.

    Args:
        engine: the logits.
        errors: receives the errors of the class in that dtype.
    """
    said, base = engine.file.dtype, errors[NOTHING]
    nearest = min(errors, key=lambda guess: _order(errors[guess].mean))
    for dtype in ("float16", "bfloat16"):
        if SPACING[said] >= SPACING[dtype]:
            continue
        of_dtype = Judge(engine.measure_rounding(NOTHING, dtype), dtype, engine.file)
        if not of_dtype.usable or not of_dtype.explains(errors[nearest]):
            continue
        if errors[nearest].mean < BESIDE * base.mean:
            return [nearest]
        if not of_dtype.explains(base):
            continue
        phrase = f"rounds as {dtype} does, not as {said}, the dtype in its file"
        if base.mean * ENGINE_MARGIN <= of_dtype.own.mean:
            phrase = f"rounds more than {said} does, as with a cache in {dtype} or TF32"
        guess = Guess(phrase, f"run it in {said}, or write {dtype} as dtype into the file")
        errors[guess] = of_dtype.own
        return [guess]
    return []


def _causes(engine: Engine, judge: Judge, errors: Mapping[Guess, Errors]) -> list[Guess]:
    """The mistakes that explain the logits of a program, the most usual first.

    Several do if their logits are not told apart. It is empty if none does, or needs to.
    """
    base = errors[NOTHING]
    nearest = min(errors, key=lambda guess: _order(errors[guess].mean))
    if nearest is NOTHING or (judge.explains(base) and not judge.prefers(errors[nearest], base)):
        return []
    # With another setting, the class may round more or less.
    of_guess = Judge(engine.measure_rounding(nearest), engine.file.dtype, engine.file)
    if not of_guess.explains(errors[nearest]):
        return []
    return [
        guess
        for guess, of in errors.items()
        if guess is not NOTHING
        and of_guess.explains(of)
        and not of_guess.prefers(errors[nearest], of)
    ]


def _order(mean: float) -> float:
    return mean if math.isfinite(mean) else math.inf


def _finding(
    program: EngineProgram,
    first: str | None,
    causes: Sequence[Guess],
    errors: Mapping[Guess, Errors],
    class_name: str,
    written: str,
) -> Finding:
    """The verdict on a program, in a sentence."""
    kl, own = program.kl_nats_per_token, program.own_kl_nats_per_token
    shown = "not a number" if kl is None else f"{kl:.2g} nats per token"
    figures = (
        f"its KL to strict float64 is {shown}, that of {class_name} in {program.dtype}{written} "
        f"{own:.2g}"
    )
    where = f"; the first difference is in {first}" if first else ""
    kept, verdict, advice = True, None, None
    if program.verdict == "rounding":
        sentence = (
            f"rounding in {program.dtype} explains the logits of {program.program}: {figures}"
        )
    elif causes:
        with_it = f"{errors[causes[0]].mean:.2g}"
        kept, verdict, advice = False, "another setting", causes[0].remedy
        sentence = f"{program.program} {program.cause}: {figures}, and {with_it} with that{where}"
    else:
        kept, verdict = False, "another function"
        layer = (
            "compare what that module computes"
            if first
            else ("add hidden states to the file (hidden.N), so that the layer can be named")
        )
        advice = f"compare the settings of the program with config.json; {layer}"
        sentence = (
            f"{program.program} does not compute what the source computes: {figures}{where}; no "
            f"mistake of the {len(program.tried)} that were tried explains it"
        )
    return Finding(
        name=f"logits of {program.program}",
        kept=kept,
        sentence=sentence,
        place=None if kept else first or program.program,
        measured=program.inflation or program.relative,
        limit=program.inflation_limit or program.tolerance,
        advice=advice,
        verdict=verdict,
        in_reason=True,
    )


def _nearest(programs: Sequence[tuple[str, Errors]]) -> Finding:
    """Which of several programs is nearest to strict float64."""
    (name, best), *others = sorted(programs, key=lambda pair: _order(pair[1].mean))
    gains = [other.kl - best.kl for _, other in others]
    sure = all(
        len(gain) >= MIN_TOKENS
        and float(gain.mean()) > STANDARD_ERRORS * float(gain.std()) / len(gain) ** 0.5
        for gain in gains
    )
    figures = ", ".join(f"{of} {errors.mean:.2g}" for of, errors in programs)
    sentence = f"{name} is the nearest" if sure else "chance may explain which is nearer"
    return Finding(
        name="nearest",
        kept=sure or None,
        sentence=f"{sentence} to strict float64 (KL in nats per token: {figures})",
        place=name if sure else None,
        in_reason=True,
    )


def _notes(source: Checkpoint, file: LogitsFile) -> list[str]:
    """What the logits of a file do not show."""
    notes, vocabulary = [], int(source.config["vocab_size"])
    tokens, rows = file.ids.shape[1], file.ids.shape[0] * len(file.positions)
    if file.columns < vocabulary:
        notes.append(f"{file.program} gives {file.columns} of {vocabulary} tokens at a position")
    if rows < MIN_TOKENS:
        notes.append(
            f"{file.program} has only {counted(rows, 'position')}, too few for mean errors, which "
            f"need {MIN_TOKENS}"
        )
    windows = {
        f"{key} {value}"
        for key, value in source.config.items()
        if "window" in key and type(value) is int and value >= tokens
    }
    for window in sorted(windows):
        notes.append(f"{counted(tokens, 'token')} do not show the effect of {window}")
    return notes
