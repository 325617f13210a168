"""Options of commands, each written once, whichever commands have it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from growkit.base.errors import InputError, plain
from growkit.base.settings import DEVICES, FEW, LONG, MANY, SHORT, Settings
from growkit.checkpoint.folder import check_name
from growkit.checkpoint.tensors import TORCH_NAMES
from growkit.planning.operation import SizeOption, Switch
from growkit.probing.settings import COMPUTED, ProbeSettings
from growkit.recipe.operations import operations
from growkit.recipe.recipe import DEFAULT_SHARD_SIZE, FORMATS


def say(message: str) -> None:
    """Print a sentence that is no result."""
    typer.echo(plain(message, keep="\n"), err=True)


def path(text: str) -> Path:
    """A path as it was given; what cannot be one ends the command."""
    try:
        check_name(text)
    except InputError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    return Path(text)


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers for a value.

    Args:
        names: gives what the value may be.
    """

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


Source = Annotated[
    Path,
    typer.Argument(
        parser=path,
        metavar="SRC",
        help="Model folder: config.json and weights; or hf://ORG/NAME@REVISION.",
    ),
]
Output = Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="Folder to make.")]
Family = Annotated[
    Path | None,
    typer.Option(
        "--family",
        parser=path,
        metavar="FILE",
        help="YAML that describes SRC's family, if growkit does not know it.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an OUT that growkit wrote.")]

SETTLED = "every weight was recovered"

Steps = Annotated[
    int | None,
    typer.Option(
        help="Also train both models for this many steps in float64, and compare what they learn.",
        show_default=False,
    ),
]
MaxKL = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="NATS",
        help="Largest KL that OUT may cost, in nats per token; exit code 1 above it.",
    ),
]

BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="ORG/NAME",
        help="What the model card calls SRC: its name on the Hub.",
    ),
]

Optimizer = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="PATH",
        help="State of SRC's optimizer (optimizer.pt, a checkpoint folder), to be grown as well.",
    ),
]

SETTINGS = {
    "text": Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", help="UTF-8 text to compare on; random tokens without."
        ),
    ],
    "prompts": Annotated[
        int | None,
        typer.Option(help=f"Windows of text, or random prompts: {MANY}, or {FEW} if {SETTLED}."),
    ],
    "length": Annotated[
        int | None,
        typer.Option(help=f"Tokens in each window or prompt: {LONG}, or {SHORT} if {SETTLED}."),
    ],
    "seed": Annotated[int, typer.Option(help="Seed of everything random.")],
    "device": Annotated[
        str,
        typer.Option(
            help="Where the proof runs: auto, cpu or cuda.", autocompletion=one_of(lambda: DEVICES)
        ),
    ],
    "trainability": Annotated[
        bool, typer.Option("--trainability", help="Every parameter of OUT must be able to train.")
    ],
    "max_kl": MaxKL,
    "steps": Steps,
}
"""The options behind ``growkit.Settings``."""


PROBED = {
    "steps": Annotated[int, typer.Option(help="Steps of AdamW that each takes.")],
    "seeds": Annotated[int, typer.Option(help="Trainings of each, on other orders of the text.")],
    "lr": Annotated[
        list[float],
        typer.Option(
            metavar="RATE…",
            help="Learning rates of SRC; each candidate gets the best, by the law of updates.",
        ),
    ],
    "weight_decay": Annotated[
        float, typer.Option(help="Of all but norms and biases, as in Trainer.")
    ],
    "warmup": Annotated[int, typer.Option(help="Steps until the rate is reached; then it stays.")],
    "batch": Annotated[int, typer.Option(help="Windows in a step.")],
    "length": Annotated[int, typer.Option(help="Tokens in a window, at most.")],
    "dtype": Annotated[
        str | None,
        typer.Option(
            help="What is computed in: float32, or bfloat16 by autocast, the default on a GPU.",
            autocompletion=one_of(lambda: COMPUTED),
        ),
    ],
    "device": Annotated[
        str,
        typer.Option(
            help="Where it trains: auto, cpu or cuda.", autocompletion=one_of(lambda: DEVICES)
        ),
    ],
}
"""The options behind ``growkit.ProbeSettings``."""

SHOWN: dict[Any, dict[str, Any]] = {Settings: SETTINGS, ProbeSettings: PROBED}


@dataclass(frozen=True)
class Writing:
    """What is written, where a command says so and no recipe."""

    dtype: Annotated[
        str | None,
        typer.Option(
            help="Store OUT in this dtype; a narrower one than SRC's rounds SRC once, first.",
            autocompletion=one_of(TORCH_NAMES.values),
        ),
    ] = None
    shard_size: Annotated[
        str, typer.Option(help="Largest output file; a larger tensor gets one of its own.")
    ] = DEFAULT_SHARD_SIZE
    verify: Annotated[
        bool,
        typer.Option(" /--no-verify", help="Publish OUT without the proof.", show_default=False),
    ] = True
    base_model: BaseModel = None
    optimizer: Optimizer = None
    format: Annotated[
        str,
        typer.Option(
            help="Files of weights: safetensors, or dcp for torch.distributed.checkpoint.",
            autocompletion=one_of(lambda: FORMATS),
        ),
    ] = FORMATS[0]


@dataclass(frozen=True)
class Running:
    """How a run goes."""

    overwrite: Overwrite = False
    proof_only: Annotated[
        bool,
        typer.Option(
            "--proof-only",
            help="Keep the proof without the weights, for growkit.load to make them of SRC again.",
        ),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; write nothing.")] = (
        False
    )


@dataclass(frozen=True)
class Answer:
    """Where the result goes."""

    report: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="Write the proof as one HTML page (.html) or as .json.",
        ),
    ] = None
    as_json: Json = False


Given = dict[str, str]
"""Options of operations that were given, by name."""


def expanded(function: Callable[..., Any], verb: str | None = None) -> Callable[..., Any]:
    """Turn parameters that stand for several options into these.

    Args:
        function: a command. A parameter whose type is a dataclass becomes an option for each of its
            fields; one of type ``Given``, an option for each option of the verb's operations.
        verb: the verb, where there is one.
    """
    signature = inspect.signature(function, eval_str=True)
    hints = {name: each.annotation for name, each in signature.parameters.items()}
    groups = {
        name: _options(hints[name], verb)
        for name in signature.parameters
        if hints[name] == Given or dataclasses.is_dataclass(hints[name])
    }

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = _value(hints[name], {each: given.pop(each) for each in group})
        return function(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kept = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        parameters += groups[name].values() if name in groups else [kept]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _value(kind: Any, values: Mapping[str, Any]) -> Any:
    if kind == Given:
        return {name: value for name, value in values.items() if value is not None}
    if kind is Settings and values["text"] is not None:
        return Settings(**{**values, "text": str(values["text"])})
    return kind(**values)


def _options(kind: Any, verb: str | None) -> dict[str, inspect.Parameter]:
    """The options that a parameter of this type stands for."""
    if kind == Given:
        assert verb is not None
        return _options_of_operations(verb)
    shown = SHOWN.get(kind) or get_type_hints(kind, include_extras=True)
    return {
        field.name: _option(field.name, field.default, shown[field.name])
        for field in dataclasses.fields(kind)
    }


def _options_of_operations(verb: str) -> dict[str, inspect.Parameter]:
    """One option for every option of a verb's operations; of several helps the longest.

    Those that only one operation has name it.
    """
    every = [operation for operation in operations(verb).values() if operation.options]
    added: dict[str, inspect.Parameter] = {}
    for name in dict.fromkeys(option.name for each in every for option in each.options):
        having = {
            each.name: option for each in every for option in each.options if option.name == name
        }
        option = max(having.values(), key=lambda option: len(option.help))
        of = "" if len(having) > 1 else f" (for {next(iter(having))})"
        shown = typer.Option(
            "--" + name.replace("_", "-"),
            metavar="|".join(option.values) or option.form or None,
            help=f"{option.help[0].upper()}{option.help[1:]}{of}.",
            autocompletion=one_of(functools.partial(iter, option.values)),
            rich_help_panel="Sizes: a factor (x2) or a size (2048)"
            if isinstance(option, SizeOption)
            else "Options of the operation; of several values the first is the default",
        )
        kind = bool if isinstance(option, Switch) else str
        added[name] = _option(name, None, Annotated[kind | None, shown])
    return added


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
