"""The command line: commands and nothing else; what they do is in the modules they call.

Exit codes: 0 done and preserved, 1 a promise was broken, 2 usage or input, 130 interrupted (or 128
plus another signal).
Results are on stdout, everything else on stderr. Torch is imported inside commands only.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from growkit.base.errors import InputError, plain
from growkit.base.settings import DEVICES, Settings
from growkit.cli.answers import also_in, console, print_json, told
from growkit.cli.commands import Commands, OfMany, command
from growkit.cli.options import (
    Answer,
    BaseModel,
    Family,
    Given,
    Json,
    MaxKL,
    Optimizer,
    Output,
    Overwrite,
    Running,
    Source,
    Steps,
    Writing,
    one_of,
    path,
    say,
)
from growkit.cli.running import carry_out, check_proved, recipe_of
from growkit.cli.signals import heed_signals
from growkit.cli.streams import make_patient, unprinted
from growkit.probing.settings import ProbeSettings
from growkit.recipe.files import shipped_recipe, shipped_recipes
from growkit.recipe.operations import DEFAULT_METHOD, operations
from growkit.version import __version__

app = typer.Typer(
    name="growkit",
    help="Grow trained language-model checkpoints, and prove that nothing they learned was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=Commands,
)
recipes_app = typer.Typer(
    help="Recipes that ship with growkit.", no_args_is_help=True, cls=Commands
)
app.add_typer(recipes_app, name="recipes")


RecipeFile = Annotated[
    Path,
    typer.Argument(
        parser=path,
        metavar="RECIPE",
        help="Recipe (YAML), growkit.json of a model, or a name of `growkit recipes list`.",
        autocompletion=one_of(shipped_recipes),
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=one_of(shipped_recipes))]


def main() -> None:
    """The ``growkit`` command."""
    heed_signals()
    make_patient()
    # Torch and transformers make half a million objects that stay: to look through them again and
    # again during imports takes 0.4 s, and to take them apart at the end 0.5 s (measured).
    gc.set_threshold(10_000)
    try:
        app()
    except SystemExit as end:  # also of what is no command of ours, as of the help
        why = unprinted()
        if why:
            say(f"error: {why}; let standard output lead where it can be written")
        raise SystemExit(end.code or (2 if why else 0)) from None
    finally:
        if "triton._C.libtriton" not in sys.modules:  # else it would complain of leaks on stderr
            gc.freeze()


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Grow trained language-model checkpoints, and prove that nothing they learned was lost."""
    if version:
        typer.echo(f"growkit {__version__}")
        raise typer.Exit


@app.command()
@command()
def inspect(
    folder: Source,
    family: Family = None,
    infer: Annotated[
        bool,
        typer.Option("--infer", help="Describe SRC's family in YAML for --family, and try it."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint is: family, sizes, heads, ties, dtype."""
    from growkit.pipeline.inspection import inspect as look
    from growkit.report.terminal import show_inspection

    if infer:
        if family is not None:
            raise InputError("--infer describes a family itself; leave --family out, or --infer")
        from growkit.inference.inferring import infer as describe  # which takes seconds

        found = describe(folder)
        if as_json:
            print_json(found)
        else:
            typer.echo(plain(found["yaml"], keep="\n"), nl=False)
        return
    result = look(folder) if family is None else look(folder, family=family)
    if as_json:
        print_json(result)
    else:
        show_inspection(console(), result)


@app.command("families")
@command()
def list_families(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A family, class or model_type, such as llama.", show_default=False
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="The whole table: every family with all that it can do.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the families, and what can be done to the models of one, or of all."""
    from growkit.pipeline.catalogue import catalogue, model_types
    from growkit.report.terminal import show_abilities, show_catalogue, show_families

    if name and every:
        raise InputError(f"--all is for every family, and {name} is one; leave one of them out")
    if not (name or every or as_json):
        show_families(console(), model_types())
        return
    result = catalogue(name)
    if as_json:
        print_json(result)
    elif name:
        show_abilities(console(), result)
    else:
        show_catalogue(console(), result)


@app.command()
@command("grow")
def grow(
    *,
    source: Source,
    output: Output,
    method: Annotated[
        str,
        typer.Option(
            help=f"Growth method: {', '.join(operations('grow'))}.",
            autocompletion=one_of(lambda: operations("grow")),
        ),
    ] = DEFAULT_METHOD,
    family: Family = None,
    options: Given,
    settings: Settings,
    writing: Writing,
    running: Running,
    answer: Answer,
) -> int:
    """Grow SRC into a larger model OUT that computes the same function, and prove it."""
    from growkit.recipe.recipe import GrowStep

    recipe = recipe_of(source, GrowStep(method, options), output, settings, writing)
    if family is None:
        return carry_out(recipe, running, answer)
    from growkit.families.described import load_description

    recipe = replace(recipe, family=load_description(family))
    return carry_out(recipe, running, answer, [family])


@app.command()
@command("convert")
def convert(
    source: Source,
    output: Output,
    options: Given,
    to: Annotated[
        str,
        typer.Option(
            help=f"Variant or layout: {', '.join(sorted(operations('convert')))}.",
            autocompletion=one_of(lambda: operations("convert")),
        ),
    ],
    settings: Settings,
    writing: Writing,
    running: Running,
    answer: Answer,
) -> int:
    """Turn SRC into another attention variant, or store it in another layout, and prove it."""
    from growkit.recipe.recipe import ConvertStep

    recipe = recipe_of(source, ConvertStep(to, options), output, settings, writing)
    return carry_out(recipe, running, answer)


@app.command()
@command()
def verify(
    source: Source,
    target: Annotated[
        Path, typer.Argument(parser=path, metavar="OUT", help="Folder of the grown model.")
    ],
    settings: Settings,
    answer: Answer,
    optimizer: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="PATH",
            help="State of SRC's optimizer that OUT was grown with, for --steps.",
        ),
    ] = None,
) -> int:
    """Prove that OUT computes what SRC computes: logits in strict float64 and in its own dtype."""
    from growkit.checkpoint.inputs import Inputs
    from growkit.checkpoint.leftovers import sweep
    from growkit.checkpoint.sources.source import find, pair
    from growkit.proof.beforehand import check_settings
    from growkit.proof.sizes import check_vocabularies
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars, show_verdict

    reads = [each for each in (settings.text, optimizer) if each]
    one, other = find(source), find(target)
    inputs = Inputs([one.folder, other.folder, *reads])
    sweep([one.folder, other.folder], inputs)
    check_report(answer.report, inputs)
    before, after = pair(one, other)
    check_settings(settings, before)
    check_vocabularies(before, after)
    from growkit.proof.verdict import verify_found  # which takes seconds

    result = verify_found(one, other, settings, optimizer, Bars())
    write_report(result, other.folder, answer.report, inputs)
    with also_in(answer.report):
        if answer.as_json:
            print_json(result)
        else:
            show_verdict(console(), result)
    return 0 if result["kept"] else 1


@app.command()
@command()
def check(
    folder: Annotated[
        Path, typer.Argument(parser=path, metavar="OUT", help="Folder that growkit wrote.")
    ],
    as_json: Json = False,
) -> int:
    """Check OUT against the hashes in its manifest: on any later day, wherever it was copied."""
    from growkit.pipeline.checking import check as hold
    from growkit.report.terminal import Bars, show_check

    result = hold(folder, progress=Bars())
    if as_json:
        print_json(result)
    else:
        show_check(console(), result)
    return 0 if result["whole"] else 1


@app.command()
@command()
def run(
    recipe: RecipeFile,
    running: Running,
    answer: Answer,
    source: Annotated[str | None, typer.Option(help="Replaces the recipe's source.")] = None,
    output: Annotated[str | None, typer.Option(help="Replaces the recipe's output.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Replaces the text of the proof."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Replaces the recipe's device.", autocompletion=one_of(lambda: DEVICES)),
    ] = None,
    max_kl: MaxKL = None,
    steps: Steps = None,
    base_model: BaseModel = None,
    optimizer: Optimizer = None,
) -> int:
    """Carry out a recipe: several steps in one pass, without an intermediate checkpoint."""
    from growkit.checkpoint.sources.source import leads_to_folder
    from growkit.recipe.files import load_recipe, recipe_file

    file = recipe_file(recipe)
    chosen = load_recipe(file, source, output)
    proof = {"device": device, "max_kl": max_kl, "steps": steps}
    given = {"text": str(text) if text else None, **proof}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in asked:
        check_proved(name, chosen.verify)
    if chosen.verify:
        chosen = replace(chosen, verify=replace(chosen.verify, **asked))
    if base_model is not None:
        chosen = replace(chosen, base_model=base_model)
    if optimizer is not None:
        chosen = replace(chosen, optimizer=str(optimizer))
    if source is None and not os.path.isdir(chosen.source) and not leads_to_folder(chosen.source):
        raise InputError(
            f"{chosen.source}, the source of {recipe}, is not a folder; name yours with --source"
        )
    return carry_out(chosen, running, answer, [file])


@app.command()
@command()
def plan(
    recipe: RecipeFile,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes per second that the disk reads and writes, such as 2GB.",
        ),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Replaces the recipe's source.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate the files, disk, memory and time of a recipe, from headers or config.json alone."""
    from growkit.pipeline.ahead import plan as look_ahead
    from growkit.recipe.files import load_recipe
    from growkit.report.plan import show_large

    result = look_ahead(load_recipe(recipe, source), bandwidth=bandwidth)
    if as_json:
        print_json(result)
    else:
        show_large(console(), result)


@app.command(cls=OfMany)
@command()
def probe(
    source: Source,
    candidates: Annotated[
        list[Path],
        typer.Option(
            parser=path,
            metavar="RECIPE…",
            help="Recipes (YAML), growkit.json of models, or names of `growkit recipes list`.",
            autocompletion=one_of(shipped_recipes),
        ),
    ],
    text: Annotated[
        Path,
        typer.Option(
            parser=path, metavar="FILE", help="UTF-8 text to train on; its last tenth is held out."
        ),
    ],
    settings: ProbeSettings,
    work: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FOLDER", help="Keep the grown models there, and what is measured."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what a probe left in --work.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="Write the result as one HTML page (.html) or as .json.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Grow SRC in several ways, train them all alike, and rank them at equal compute."""
    from growkit.probing.probe import probe as try_all
    from growkit.probing.probe import reads_of
    from growkit.report.probe import show_probe
    from growkit.report.saving import check_report, write_probe
    from growkit.report.terminal import Bars

    inputs, made = reads_of(source, candidates, text, work)
    check_report(report, inputs, made)
    if report and work and os.path.realpath(report) == os.path.realpath(work):
        raise InputError(f"{report} cannot be both the report and --work")
    result = try_all(source, candidates, text, settings, work=work, resume=resume, progress=Bars())
    try:
        with told(f"the probe's work is in {work}; --resume continues it" if work else ""):
            write_probe(result, report, inputs, made)
    finally:  # what may have taken hours is shown whether or not there is a report
        with also_in(report):
            if as_json:
                print_json(result)
            else:
                show_probe(console(), result)


@app.command()
@command()
def demo(
    output: Annotated[
        Path | None, typer.Argument(parser=path, metavar="OUT", help="Keep the grown model there.")
    ] = None,
    hidden: Annotated[str, typer.Option(help="How much the hidden size grows.")] = "x2",
    signal_heads: Annotated[str, typer.Option(help="How much the signal heads grow.")] = "x4",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> int:
    """The whole story on the model that ships with growkit: grow it, prove it, let it write."""
    from growkit.cli.demo.story import tell
    from growkit.report.terminal import Bars, show_demo

    story = tell(output, hidden, signal_heads, overwrite, Bars())
    with also_in(output):
        if as_json:
            print_json(story)
        else:
            show_demo(console(), story)
    return 0 if story["growth"]["kept"] else 1


@recipes_app.command("list")
@command()
def recipes_list() -> None:
    """List the recipes, each with what it does."""
    for name, file in shipped_recipes().items():
        first = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        typer.echo(f"{name:32} {first}")


@recipes_app.command("show")
@command()
def recipes_show(name: Name) -> None:
    """Print a recipe."""
    typer.echo(shipped_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy")
@command()
def recipes_copy(
    name: Name,
    folder: Annotated[
        Path, typer.Argument(parser=path, metavar="FOLDER", help="Where to put it.")
    ] = Path("."),
) -> None:
    """Copy a recipe into a folder, to be changed there."""
    from growkit.checkpoint.publishing import write_whole

    file = shipped_recipe(name)
    destination = folder / file.name
    if os.path.lexists(destination):
        raise InputError(f"{destination} already exists; choose another folder")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; make it first")
    write_whole(destination, file.read_text(encoding="utf-8"), new=True)
    with also_in(destination):
        typer.echo(str(destination))
