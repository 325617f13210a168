"""Run a recipe for the command line, and show what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.cli.answers import also_in, console, print_json, told
from growkit.cli.options import Answer, Running, Writing
from growkit.recipe.recipe import Recipe, Step


def recipe_of(
    source: Path, step: Step, output: Path, settings: Settings, writing: Writing
) -> Recipe:
    """The recipe of a single step.

    Raises:
        InputError: something is asked of a proof that is switched off.
    """
    proof = settings if writing.verify else None
    for name in ("max_kl", "steps"):
        if getattr(settings, name) is not None:
            check_proved(name, proof)
    return Recipe(
        str(source),
        (step,),
        str(output),
        proof,
        settings.seed,
        dtype=writing.dtype,
        shard_size=writing.shard_size,
        base_model=writing.base_model,
        optimizer=str(writing.optimizer) if writing.optimizer else None,
        format=writing.format,
    )


def check_proved(name: str, proof: Settings | None) -> None:
    """What is asked of a proof that there is not: a limit, say, would be taken for one kept.

    Args:
        name: of the setting.
        proof: the settings; None where the proof is switched off.

    Raises:
        InputError: it is switched off.
    """
    if proof is None:
        option = "--" + name.replace("_", "-")
        raise InputError(f"{option} is for the proof, which is switched off; switch it on")


def carry_out(recipe: Recipe, running: Running, answer: Answer, reads: Sequence[Path] = ()) -> int:
    """Run a recipe and show what came of it.

    Args:
        recipe: which.
        running: how.
        answer: what is shown, and which reports are written.
        reads: other files that it was read from.

    Returns:
        The exit code.

    Raises:
        InputError: it cannot be carried out, or its result not be written.
    """
    from growkit.checkpoint.publishing import rejected_name
    from growkit.pipeline.surgery import run
    from growkit.recipe.places import inputs_of, output_path
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars, show_growth, show_verdict
    from growkit.results.advice import training_hint

    if answer.report is not None:
        check_proved("report", recipe.verify)
    inputs, output = inputs_of(recipe, reads), output_path(recipe)
    check_report(answer.report, inputs, [output, rejected_name(output)])
    result = run(recipe, reads=reads, **vars(running), progress=Bars())
    written = "" if running.dry_run else f"{result['output']} is written"
    with told(written), also_in(written):
        if result["verification"]:
            write_report(result["verification"], Path(result["output"]), answer.report, inputs)
        if answer.as_json:
            print_json(result)
        else:
            screen = console()
            show_growth(screen, result)
            if result["verification"]:
                show_verdict(screen, result["verification"])
            if not running.dry_run:
                kept = ": the proof, without the weights" if running.proof_only else ""
                screen.print(f"written to {result['output']}{kept}", soft_wrap=True)
                if then := training_hint(result):
                    screen.print(f"next: {then}", soft_wrap=True)
    return 1 if result["kept"] is False else 0
