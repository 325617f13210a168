"""The commands: each calls one function of growkit, and prints its result.

Exit codes: 0 done and preserved, 1 a promise was broken, 2 usage or input, 130 interrupted (or 128
plus another signal).
Results are on stdout, everything else on stderr. Torch is imported inside commands only.
"""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from growkit.base import __version__
from growkit.base.errors import InputError, plain
from growkit.base.settings import DEVICES, Running, Settings
from growkit.cli import command_building as cli
from growkit.cli.command_building import JSON, OUTPUT, SOURCE, RecipeOptions, command, print_result
from growkit.cli.signals import handle_signals
from growkit.extras.hub.addresses import address_of
from growkit.extras.probing.probe_settings import ProbeSettings
from growkit.model.checkpoint.inputs import Inputs
from growkit.model.checkpoint.publishing import rejected_name
from growkit.planning import recipe as recipes
from growkit.planning.operation import operations
from growkit.planning.recipe import Recipe, Step, load_description, load_recipe
from growkit.sources import find, open_both

app = typer.Typer(
    name="growkit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=cli.Commands,
)
recipes_app = typer.Typer(
    help="Recipes that ship with growkit.", no_args_is_help=True, cls=cli.Commands
)
app.add_typer(recipes_app, name="recipes")

NAME = cli.argument("NAME", "", cli.SHIPPED)


def run_app() -> None:
    """The ``growkit`` command."""
    handle_signals()
    cli.drop_failed_output()
    try:
        app()
    except SystemExit as end:  # also after the help
        if why := cli.unprinted():  # a broken promise keeps its exit code
            kind = "warning" if end.code else "error"
            cli.print_message(f"{kind}: {why}; redirect standard output to a writable place")
        raise SystemExit(end.code or (2 if why else 0)) from None
    finally:
        # Destroying the half a million objects of torch and transformers takes 0.5 s (measured).
        if "triton._C.libtriton" not in sys.modules:  # else triton reports leaks on stderr
            gc.freeze()


@app.callback(invoke_without_command=True)
def top(
    version: bool = cli.flag("--version", "Print the version."),
    trust_code: Path | None = cli.value(
        None, "Run the model code in FOLDER, which its config.json names.", "FOLDER"
    ),
) -> None:
    """Grow trained language-model checkpoints, and prove that nothing they learned was lost."""
    if version:
        typer.echo(f"growkit {__version__}")
        raise typer.Exit
    if trust_code is not None:
        from growkit.extras.trusted_code import trust  # which imports transformers

        trust(trust_code)


@command(app)
def inspect_command(
    folder: Path = SOURCE,
    family: Path | None = cli.FAMILY,
    infer: bool = cli.flag("--infer", "Infer SRC's family, test it, and print it for --family."),
    as_json: bool = JSON,
) -> None:
    """Show what a checkpoint is: family, sizes, heads, ties, dtype."""
    from growkit.extras.inspection import inspecting

    if not infer:
        print_result(inspecting.inspect(folder, family=family), as_json)
        return
    if family is not None:
        raise InputError("--infer finds the family itself; leave out --family, or --infer")
    from growkit.extras.family_inference.inferring import infer as infer_family  # takes seconds

    description = infer_family(folder)
    if as_json:
        print_result(description, as_json)
    else:
        typer.echo(plain(description["yaml"], keep="\n"), nl=False)


@command(app, name="families")
def list_families(
    name: str | None = cli.argument(
        "NAME", "A family, class or model_type, such as llama.", default=None
    ),
    every: bool = cli.flag("--all", "Every family, with all the operations that it supports."),
    as_json: bool = JSON,
) -> None:
    """List the families, and the operations that one of them, or each, supports."""
    from growkit.cli.catalogue import catalogue, model_types, table
    from growkit.report.terminal import ability_parts, family_parts

    if name and every:
        raise InputError(f"--all lists every family, and {name} is one; leave out one of the two")
    if name or every or as_json:
        abilities = catalogue(name)
        print_result(abilities, as_json, parts=ability_parts(table(abilities), every=not name))
    else:
        print_result(None, False, parts=family_parts(model_types()))


@command(app, "grow", cls=cli.OperationCommand)
def grow_command(
    *,
    source: Path = SOURCE,
    output: Path = OUTPUT,
    method: str = cli.value(
        recipes.DEFAULT_METHOD,
        f"Growth method: {', '.join(operations('grow'))}. With --help: its options alone.",
        values=operations("grow"),
    ),
    family: Path | None = cli.FAMILY,
    options: cli.OperationOptions,
    settings: Settings,
    written: RecipeOptions,
    verify: bool = cli.NO_VERIFY,
    running: Running,
    destination: cli.Destination,
) -> int:
    """Grow SRC into a larger model OUT that computes the same function, and prove it."""
    recipe = _recipe(source, recipes.GrowStep(method, options), output, verify, settings, written)
    if family is None:
        return _run(recipe, running, destination)
    return _run(replace(recipe, family=load_description(family)), running, destination, [family])


@command(app, "convert", cls=cli.OperationCommand)
def convert_command(
    *,
    source: Path = SOURCE,
    output: Path = OUTPUT,
    options: cli.OperationOptions,
    to: str = cli.value(
        ...,
        f"Variant or layout: {', '.join(operations('convert'))}. With --help: its options alone.",
        values=operations("convert"),
    ),
    settings: Settings,
    written: RecipeOptions,
    verify: bool = cli.NO_VERIFY,
    running: Running,
    destination: cli.Destination,
) -> int:
    """Convert SRC to another attention variant, or to another layout of its files, and prove it."""
    recipe = _recipe(source, recipes.ConvertStep(to, options), output, verify, settings, written)
    return _run(recipe, running, destination)


@command(app, "shrink", cls=cli.OperationCommand)
def shrink_command(
    *,
    source: Path = SOURCE,
    output: Path = OUTPUT,
    options: cli.OperationOptions,
    method: str | None = cli.value(
        None,
        f"Method: {', '.join(operations('shrink'))}; by default the one with the given options, "
        f"or {recipes.DEFAULT_SHRINKING}.",
        values=operations("shrink"),
    ),
    settings: Settings,
    written: RecipeOptions,
    verify: bool = cli.NO_VERIFY,
    running: Running,
    destination: cli.Destination,
) -> int:
    """Make SRC smaller: undo its growth, or leave out tokens; and prove what is left."""
    step = recipes.ShrinkStep(method or recipes.method_for(options), options)
    recipe = _recipe(source, step, output, verify, settings, written)
    return _run(recipe, running, destination)


@command(app)
def verify_command(
    *,
    source: Path = SOURCE,
    target: Path | None = cli.argument(
        "OUT",
        "Folder of the grown model, or a converted model; not needed with --logits.",
        default=None,
    ),
    settings: Settings,
    destination: cli.Destination,
    optimizer: Path | None = cli.value(
        None, "SRC's optimizer state, which was grown with OUT, for --steps.", "PATH"
    ),
    adapter: Path | None = cli.value(
        None, "SRC's adapter, which was grown with OUT or merged into it, to compare too.", "PATH"
    ),
    logits: list[Path] = cli.value(
        [], "Logits that another program computed; may be repeated.", "FILE"
    ),
) -> int:
    """Prove that OUT computes what SRC computes: logits in strict float64 and in its own dtype."""
    if target is None:
        if not logits:
            raise InputError("verify compares SRC with OUT; name OUT, or logits of it (--logits)")
        if (settings, optimizer, adapter) != (Settings(), None, None):
            raise InputError(
                "with --logits alone, the file has the tokens, and SRC runs on the CPU; leave out "
                "the other options, or name OUT"
            )
    from growkit.proof.preflight import check_settings
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars

    reads = [path for path in (settings.text, optimizer, adapter, *logits) if path]
    one, other = find(source), None if target is None else find(target)
    folders = [model.folder for model in (one, other) if model]
    inputs = Inputs([*folders, *reads])
    check_report(destination.report, inputs)
    result: Any
    if other is None:
        from growkit.extras.program_logits.logits_alone import verify_logits  # takes seconds

        result = verify_logits(one.name, logits, progress=Bars())
    else:
        before, _ = open_both(one, other)
        check_settings(settings, before, adapter=adapter is not None)
        from growkit.pipeline.verifying import verify  # takes seconds

        states: Any = {"optimizer": optimizer, "adapter": adapter, "logits": logits}
        result = verify(one.name, other.name, settings, **states, progress=Bars())
    write_report(result, destination.report, inputs, folders[1:], folders)
    print_result(result, destination.json, destination.report)
    return 0 if result["kept"] else 1


@command(app)
def check_command(
    folder: Path = cli.argument("OUT", "Folder that growkit wrote."), as_json: bool = JSON
) -> int:
    """Check OUT against the hashes in its manifest, at any later time and on any machine."""
    from growkit.extras.checksums.file_hashes import check
    from growkit.report.terminal import Bars

    result = check(folder, progress=Bars())
    print_result(result, as_json)
    return 0 if result["whole"] else 1


@command(app)
def run_command(
    *,
    recipe: Path = cli.RECIPE,
    running: Running,
    destination: cli.Destination,
    source: str | None = cli.value(None, "Replaces the recipe's source."),
    output: str | None = cli.value(None, "Replaces the recipe's output."),
    text: Path | None = cli.value(None, "Replaces the text of the proof.", "FILE"),
    device: str | None = cli.value(None, "Replaces the recipe's device.", values=DEVICES),
    max_kl: float | None = cli.field_option(Settings, "max_kl"),
    steps: int | None = cli.field_option(Settings, "steps"),
    base_model: str | None = cli.field_option(Recipe, "base_model"),
    optimizer: Path | None = cli.field_option(Recipe, "optimizer"),
    adapter: Path | None = cli.field_option(Recipe, "adapter"),
) -> int:
    """Run a recipe: several steps in one pass, without an intermediate checkpoint."""
    file = recipes.recipe_file(recipe)
    chosen = load_recipe(file, source, output)
    proof = _proof_options(chosen.verify, text=text, device=device, max_kl=max_kl, steps=steps)
    chosen = replace(
        chosen,
        verify=chosen.verify and replace(chosen.verify, **proof),
        base_model=base_model or chosen.base_model,
        optimizer=str(optimizer) if optimizer else chosen.optimizer,
        adapter=str(adapter) if adapter else chosen.adapter,
    )
    if source is None and not os.path.isdir(chosen.source) and not address_of(chosen.source):
        raise InputError(
            f"{chosen.source}, the source of {recipe}, is not a folder; name yours with --source"
        )
    return _run(chosen, running, destination, [file])


def _recipe(
    source: Path, step: Step, output: Path, verify: bool, settings: Settings, written: RecipeOptions
) -> Recipe:
    """The recipe of a single step."""
    proof = settings if verify else None
    _proof_options(proof, max_kl=settings.max_kl, steps=settings.steps)
    return Recipe(str(source), (step,), str(output), proof, settings.seed, **written)


def _proof_options(proof: Settings | None, **options: Any) -> dict[str, Any]:
    """Select the options of the proof that were given.

    Raises:
        InputError: the proof is switched off, so that a given limit would not be checked.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    if chosen and proof is None:
        flag = cli.flag_of(next(iter(chosen)))
        raise InputError(f"{flag} needs the proof, which is switched off; switch it on")
    return chosen


def _run(
    recipe: Recipe, running: Running, destination: cli.Destination, reads: Sequence[Path] = ()
) -> int:
    """Run a recipe, and print and save its result.

    Args:
        recipe: the recipe.
        running: options of the run.
        destination: destination of the result.
        reads: files from which the recipe was read.

    Returns:
        The exit code.
    """
    from growkit.pipeline import running as pipeline
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars, growth_parts, training_hint
    from growkit.report.view import Paragraph

    inputs, output, report = recipe.inputs(reads), recipe.output_path, destination.report
    _proof_options(recipe.verify, report=report)
    check_report(report, inputs, [output, rejected_name(output)])
    result = pipeline.run(recipe, reads=reads, **vars(running), progress=Bars())
    parts, written = [*growth_parts(result)], ""
    if not running.dry_run:
        written = f"{result['output']} is written"
        kept = ": the proof, without the weights" if running.proof_only else ""
        parts.append(Paragraph(f"written to {result['output']}{kept}"))
        parts += [Paragraph(f"next: {then}") for then in [training_hint(result)] if then]
    with cli.prefix_errors(written):
        if result["verification"]:
            write_report(result["verification"], report, inputs, [Path(result["output"])])
        print_result(result, destination.json, written, parts)
    return 1 if result["kept"] is False else 0


@command(app)
def plan_command(
    recipe: Path = cli.RECIPE,
    bandwidth: str | None = cli.value(
        None, "Speed of the disk in bytes per second, such as 2GB.", "BYTES"
    ),
    source: str | None = cli.value(None, "Replaces the recipe's source."),
    as_json: bool = JSON,
) -> None:
    """Estimate the files, disk, memory and time of a recipe, from headers or config.json alone."""
    from growkit.extras.inspection.large_plan import plan

    print_result(plan(load_recipe(recipe, source), bandwidth=bandwidth), as_json)


@command(app, cls=cli.ListCommand)
def probe_command(
    *,
    source: Path = SOURCE,
    candidates: list[Path] = cli.value(
        ...,
        "Recipes (YAML), growkit.json of models, or names of `growkit recipes list`.",
        "RECIPE…",
        cli.SHIPPED,
    ),
    text: Path = cli.value(..., "UTF-8 text to train on; its last tenth is held out.", "FILE"),
    settings: ProbeSettings,
    work: Path | None = cli.value(
        None, "Keep the grown models and the measurements in this folder.", "FOLDER"
    ),
    resume: bool = cli.flag("--resume", "Continue the probe in --work."),
    destination: cli.Destination,
) -> None:
    """Grow SRC in several ways, train them all alike, and rank them at equal compute."""
    from growkit.extras.probing import probe as probing
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars

    report, outputs = destination.report, [work] if work else []
    inputs = Inputs([find(source).folder, text, *candidates])
    check_report(report, inputs, outputs, cards=False)
    result = probing.probe(
        source,
        candidates,
        text,
        settings,
        work=work,
        resume=resume,
        progress=Bars(),
    )
    try:
        with cli.prefix_errors(
            f"the probe's work is in {work}; --resume continues it" if work else ""
        ):
            write_report(result, report, inputs, outputs)
    finally:  # hours of work are printed even if the report cannot be written
        print_result(result, destination.json, report)


@command(app)
def demo_command(
    output: Path | None = cli.argument("OUT", "Keep the grown model there.", default=None),
    hidden: str = cli.value("x2", "How much the hidden size grows."),
    signal_heads: str = cli.value("x4", "How much the signal heads grow."),
    overwrite: bool = cli.field_option(Running, "overwrite"),
    as_json: bool = JSON,
) -> int:
    """Grow the model that ships with growkit, prove it, and let both models write."""
    from growkit.cli.demo import run_demo
    from growkit.report.terminal import Bars

    story = run_demo(output, hidden, signal_heads, overwrite, Bars())
    print_result(story, as_json, output)
    return 0 if story["growth"]["kept"] else 1


@command(recipes_app, name="list")
def recipes_list() -> None:
    """List the recipes and what each does."""
    for name, file in recipes.shipped_recipes().items():
        first = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        typer.echo(f"{name:32} {first}")


@command(recipes_app, name="show")
def recipes_show(name: str = NAME) -> None:
    """Print a recipe."""
    typer.echo(recipes.shipped_recipe(name).read_text(encoding="utf-8"), nl=False)


@command(recipes_app, name="copy")
def recipes_copy(
    name: str = NAME,
    folder: Path = cli.argument("FOLDER", "Folder of the copy.", default=Path(".")),
) -> None:
    """Copy a recipe into a folder, to edit it there."""
    from growkit.report.saving import write_whole  # which imports Jinja

    file = recipes.shipped_recipe(name)
    copy = folder / file.name
    if os.path.lexists(copy):
        raise InputError(f"{copy} already exists; choose another folder")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; make it first")
    write_whole(copy, file.read_text(encoding="utf-8"), new=True)
    typer.echo(copy)
