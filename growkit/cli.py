"""The command line: commands and nothing else; what they do is in the modules they call.

Exit codes: 0 done and preserved, 1 a promise was broken, 2 usage or input, 130 interrupted (or 128
plus another signal).
Results are on stdout, everything else on stderr. Torch is imported inside commands only.
"""

from __future__ import annotations

import functools
import gc
import inspect as introspection
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from growkit import __version__
from growkit.checkpoint.folder import check_name
from growkit.conversions.conversion import conversions, targets
from growkit.errors import InputError, plain, reason
from growkit.growth.method import methods
from growkit.recipe import DEFAULT_SHARD_SIZE, DEFAULT_SNR_DB
from growkit.settings import LONG, SHORT, Settings
from growkit.streams import make_patient

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="growkit",
    help="Grow trained language-model checkpoints, and prove that nothing they learned was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="Recipes that ship with growkit.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")


def _path(text: str) -> Path:
    try:
        check_name(text)
    except InputError as error:
        _say(f"error: {error}")
        raise typer.Exit(2) from None
    return Path(text)


Source = Annotated[
    Path,
    typer.Argument(parser=_path, metavar="SRC", help="Model folder: config.json and weights."),
]
Output = Annotated[Path, typer.Argument(parser=_path, metavar="OUT", help="Folder to make.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Text = Annotated[
    Path | None,
    typer.Option(
        parser=_path, metavar="FILE", help="UTF-8 text to compare on; random tokens without."
    ),
]
Device = Annotated[str, typer.Option(help="Where the proof runs: auto, cpu or cuda.")]
Prompts = Annotated[int, typer.Option(help="Windows of text, or random prompts, to compare.")]
Length = Annotated[
    int | None,
    typer.Option(help=f"Tokens in each: {LONG}, or {SHORT} where no weight can be lost."),
]
Trainability = Annotated[
    bool, typer.Option("--trainability", help="Every parameter of OUT must be able to train.")
]
Report = Annotated[
    Path | None,
    typer.Option(
        parser=_path, metavar="FILE", help="Write the proof as one HTML page (.html) or as .json."
    ),
]
Figures = Annotated[
    Path | None,
    typer.Option(
        parser=_path, metavar="FOLDER", help="Write the charts of the proof as SVG files."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an OUT that growkit wrote.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, touch nothing.")]
Proof = Annotated[
    bool, typer.Option(" /--no-verify", help="Publish OUT without the proof.", show_default=False)
]


INTERRUPTED = "interrupted: nothing half-written is left"


def main() -> None:
    """The ``growkit`` command."""
    handlers = {"SIGINT": _interrupt, "SIGTERM": _terminate, "SIGHUP": _terminate}
    for name, handler in handlers.items():
        signum = getattr(signal, name, None)  # Windows has no SIGHUP
        if signum and signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and & ignore some
            signal.signal(signum, handler)
    make_patient()
    # Torch and transformers make half a million objects that stay: to look through them again and
    # again during imports takes 0.4 s, and to take them apart at the end 0.5 s (measured).
    gc.set_threshold(10_000)
    try:
        app()
    finally:
        gc.freeze()


def _interrupt(signum: int, frame: object) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # once is enough: cleaning up is not to be disturbed
    raise KeyboardInterrupt


def _terminate(signum: int, frame: object) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)  # unwinds, so that nothing half-written stays


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Turn what goes wrong inside a command into a sentence and an exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        code = 2
        try:
            code = function(*args, **kwargs) or 0
        except KeyboardInterrupt as interrupt:
            _say(f"interrupted: {interrupt}" if interrupt.args else INTERRUPTED)
            code = 130
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # torch and Rust raise some that are no Exception
            if os.environ.get("GROWKIT_DEBUG"):
                raise
            if isinstance(error, InputError):
                _say(f"error: {error}")
            elif isinstance(error, MemoryError):
                _say("error: memory ran out; use a machine with more, or compare less at once")
            elif isinstance(error, OSError):
                _say(f"error: {reason(error)}")
            else:
                _say(traceback.format_exc())
                _say("error: this is a fault of growkit itself; please report it with the above")
        raise typer.Exit(code)

    return guarded


def with_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's ``sizes`` by one option for every size of every growth method."""
    options: dict[str, str] = {}
    for method in methods().values():
        for option in method.options:
            options[option.name] = max(options.get(option.name, ""), option.help, key=len)
    panel = "Sizes: a factor (x2) or a size (2048)"
    added = {name: _optional(name, text, "xN|SIZE", panel) for name, text in options.items()}
    return _with_options(function, "sizes", added)


def with_choices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's ``options`` by one option for every choice of every conversion."""
    added = {
        choice.name: _optional(
            choice.name,
            f"{choice.help} (for --to {conversion.name})",
            "|".join(choice.values) or choice.form,
            "Options of single conversions; the first value is the default",
        )
        for conversion in conversions().values()
        for choice in conversion.choices
    }
    return _with_options(function, "options", added)


def _optional(name: str, text: str, metavar: str, panel: str) -> introspection.Parameter:
    """A command-line option that may be left out."""
    option = typer.Option(
        "--" + name.replace("_", "-"),
        metavar=metavar,
        help=text[0].upper() + text[1:] + ".",
        rich_help_panel=panel,
    )
    return introspection.Parameter(
        name,
        introspection.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _with_options(
    function: Callable[..., Any], into: str, added: dict[str, introspection.Parameter]
) -> Callable[..., Any]:
    """Replace one parameter of a command, a dictionary, by an option for each of its keys."""
    signature = introspection.signature(function, eval_str=True)
    kept = [p for name, p in signature.parameters.items() if name != into]

    @functools.wraps(function)
    def wrapped(**kwargs: Any) -> Any:
        given = {name: value for name in added if (value := kwargs.pop(name)) is not None}
        return function(**kwargs, **{into: given})

    parameters = [p.replace(kind=introspection.Parameter.KEYWORD_ONLY) for p in kept]
    parameters += added.values()
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Grow trained language-model checkpoints, and prove that nothing they learned was lost."""
    if version:
        typer.echo(f"growkit {__version__}")
        raise typer.Exit


@app.command()
@command
def inspect(folder: Source, as_json: Json = False) -> None:
    """Show what a checkpoint is: family, sizes, heads, ties, dtype."""
    from growkit.inspection import inspect as look
    from growkit.report.terminal import show_inspection

    result = look(folder)
    if as_json:
        _print_json(result)
    else:
        show_inspection(_console(), result)


@app.command()
@with_sizes
@command
def grow(
    source: Source,
    output: Output,
    sizes: dict[str, str],
    method: Annotated[str, typer.Option(help=f"Growth method: {', '.join(methods())}.")] = (
        "hypercloning"
    ),
    symmetry: Annotated[
        str, typer.Option(help="break: copies can part in training; keep: they stay equal.")
    ] = "break",
    snr_db: Annotated[
        float, typer.Option(help="Signal-to-noise ratio of the random splits, in dB.")
    ] = DEFAULT_SNR_DB,
    seed: Seed = 0,
    dtype: Annotated[str | None, typer.Option(help="Store OUT in a wider dtype.")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest output file.")] = DEFAULT_SHARD_SIZE,
    text: Text = None,
    device: Device = "auto",
    prompts: Prompts = Settings.prompts,
    length: Length = None,
    trainability: Trainability = False,
    verify: Proof = True,
    report: Report = None,
    figures: Figures = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Grow SRC into a larger model OUT that computes the same function, and prove it."""
    from growkit.recipe import GrowStep, Recipe

    step = GrowStep(method, sizes, symmetry, snr_db)  # type: ignore[arg-type]
    chosen = Settings(_text(text), prompts, length, seed, device, trainability)
    settings = chosen if verify else None
    recipe = Recipe(str(source), (step,), str(output), settings, seed, dtype, shard_size)
    return _run(recipe, overwrite, dry_run, as_json, report, figures)


@app.command()
@with_choices
@command
def convert(
    source: Source,
    output: Output,
    options: dict[str, str],
    to: Annotated[str, typer.Option(help=f"Variant or layout: {', '.join(targets())}.")],
    dtype: Annotated[str | None, typer.Option(help="Store OUT in a wider dtype.")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest output file.")] = DEFAULT_SHARD_SIZE,
    text: Text = None,
    device: Device = "auto",
    prompts: Prompts = Settings.prompts,
    length: Length = None,
    seed: Seed = 0,
    trainability: Trainability = False,
    verify: Proof = True,
    report: Report = None,
    figures: Figures = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Turn SRC into another attention variant, or store it in another layout, and prove it."""
    from growkit.recipe import ConvertStep, Recipe

    chosen = Settings(_text(text), prompts, length, seed, device, trainability)
    settings = chosen if verify else None
    step = ConvertStep(to, options)
    recipe = Recipe(str(source), (step,), str(output), settings, seed, dtype, shard_size)
    return _run(recipe, overwrite, dry_run, as_json, report, figures)


@app.command()
@command
def verify(
    source: Source,
    target: Annotated[
        Path, typer.Argument(parser=_path, metavar="OUT", help="Folder of the grown model.")
    ],
    text: Text = None,
    device: Device = "auto",
    prompts: Prompts = Settings.prompts,
    length: Length = None,
    seed: Seed = 0,
    trainability: Trainability = False,
    report: Report = None,
    figures: Figures = None,
    as_json: Json = False,
) -> int:
    """Prove that OUT computes what SRC computes: logits in strict float64 and as it will run."""
    from growkit.checkpoint.inputs import Inputs
    from growkit.checkpoint.leftovers import sweep
    from growkit.proof.verdict import proof_bytes
    from growkit.proof.verdict import verify as prove
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars, show_verdict

    settings = Settings(_text(text), prompts, length, seed, device, trainability)
    inputs = Inputs([source, target, *([text] if text else [])])
    sweep([source, target], inputs)
    check_report(report, figures, inputs)
    with Bars().bytes("proving", proof_bytes(source, target)) as advance:
        result = prove(source, target, **vars(settings), advance=advance)
    write_report(result, target, report, figures, inputs)
    if as_json:
        _print_json(result)
    else:
        show_verdict(_console(), result)
    return 0 if result["kept"] else 1


@app.command()
@command
def run(
    recipe: Annotated[
        Path,
        typer.Argument(
            parser=_path, metavar="RECIPE", help="Recipe (YAML), or growkit.json of a model."
        ),
    ],
    source: Annotated[str | None, typer.Option(help="Replaces the recipe's source.")] = None,
    output: Annotated[str | None, typer.Option(help="Replaces the recipe's output.")] = None,
    report: Report = None,
    figures: Figures = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Carry out a recipe: several steps in one pass, without an intermediate checkpoint."""
    from growkit.recipe import load_recipe

    chosen = load_recipe(recipe, source, output)
    return _run(chosen, overwrite, dry_run, as_json, report, figures, [recipe])


@app.command()
@command
def demo(
    output: Annotated[
        Path | None, typer.Argument(parser=_path, metavar="OUT", help="Keep the grown model there.")
    ] = None,
    hidden: Annotated[str, typer.Option(help="How much the hidden size grows.")] = "x2",
    signal_heads: Annotated[str, typer.Option(help="How much the signal heads grow.")] = "x4",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> int:
    """The whole story on the model that ships with growkit: grow it, prove it, let it write."""
    from growkit.demo.story import tell
    from growkit.report.terminal import Bars, show_demo

    story = tell(output, hidden, signal_heads, overwrite, Bars())
    if as_json:
        _print_json(story)
    else:
        show_demo(_console(), story)
    return 0 if story["growth"]["kept"] else 1


@recipes_app.command("list")
@command
def recipes_list() -> None:
    """List the recipes, each with what it does."""
    from growkit.recipe import shipped_recipes

    for name, file in shipped_recipes().items():
        first = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        typer.echo(f"{name:32} {first}")


@recipes_app.command("show")
@command
def recipes_show(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Print a recipe."""
    from growkit.recipe import shipped_recipe

    typer.echo(shipped_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy")
@command
def recipes_copy(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    folder: Annotated[
        Path, typer.Argument(parser=_path, metavar="FOLDER", help="Where to put it.")
    ] = Path("."),
) -> None:
    """Copy a recipe into a folder, to be changed there."""
    from growkit.checkpoint.whole import write_whole
    from growkit.recipe import shipped_recipe

    file = shipped_recipe(name)
    destination = folder / file.name
    if os.path.lexists(destination):
        raise InputError(f"{destination} already exists; choose another folder")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; make it first")
    write_whole(destination, file.read_text(encoding="utf-8"), new=True)
    typer.echo(str(destination))


def _run(
    recipe: Any,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    report: Path | None,
    figures: Path | None,
    reads: Sequence[Path] = (),
) -> int:
    from growkit.checkpoint.publishing import rejected_name
    from growkit.report.saving import check_report, write_report
    from growkit.report.terminal import Bars, show_growth, show_verdict
    from growkit.surgery import inputs_of, output_path
    from growkit.surgery import run as carry_out

    inputs, output = inputs_of(recipe, reads), output_path(recipe)
    check_report(report, figures, inputs, [output, rejected_name(output)])
    result = carry_out(recipe, reads=reads, overwrite=overwrite, dry_run=dry_run, progress=Bars())
    written = "" if dry_run else f"{result['output']} is written"
    with _told(written):
        if result["verification"]:
            write_report(result["verification"], Path(result["output"]), report, figures, inputs)
        if as_json:
            _print_json(result)
        else:
            console = _console()
            show_growth(console, result)
            if result["verification"]:
                show_verdict(console, result["verification"])
            if not dry_run:
                console.print(f"written to {result['output']}", soft_wrap=True)
    return 1 if result["kept"] is False else 0


@contextmanager
def _told(done: str) -> Iterator[None]:
    """Whatever goes wrong in here, it is told what has been done before."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{done}; {error}" if done else str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*filter(None, [done])) from None


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _print_json(result: Any) -> None:
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    # What steers a terminal stands in texts alone, where JSON has another way to write it.
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def _console() -> Console:
    from growkit.report.terminal import PlainConsole

    # Into a file or a pipe, lines stay whole.
    return PlainConsole(width=None if sys.stdout.isatty() else 200)


def _say(message: str) -> None:
    typer.echo(plain(message, keep="\n"), err=True)
