"""The view of logits that other programs computed."""

from collections.abc import Iterator
from pathlib import Path

from growkit.report import view
from growkit.report.view import Found, Grid, ResultView, Topic, next_step, recorded

FIGURES = (
    *("dtype", "positions", "columns", "verdict", "relative", "tolerance"),
    *("kl_nats_per_token", "own_kl_nats_per_token", "inflation", "inflation_limit"),
)
"""Figures of a program that a table shows."""

CONDITIONS = ("source", "created", "seconds", "versions")


def engine_view(result: Found) -> ResultView:
    """Make the view of a ``growkit.EngineResult``."""
    section, source = result["sections"]["engine"], Path(str(result["source"])).name
    programs = ", ".join(str(program["program"]) for program in section["programs"])
    files = {program["file"]: program["sha256"] for program in section["programs"]}
    return ResultView(
        "good" if result["kept"] else "bad",
        str(result["verdict"]).capitalize(),
        about=f"{source} in {programs}",
        subject=f"{source}, as {programs} computes it",
        reason=str(result["reason"]),
        advice=recorded({"Next": next_step(result)}),
        sections=[
            *engine_topics(section),
            Topic(
                "How it was measured",
                [
                    recorded(result, CONDITIONS),
                    Grid(["file of logits", "SHA-256"], [*files.items()], "cc"),
                ],
            ),
        ],
    )


def engine_topics(section: Found | None) -> Iterator[Topic]:
    """The figures of every program, its states, and the mistakes that were tried."""
    programs = section["programs"] if section else ()
    rows = [[key.replace("_", " "), *(program[key] for program in programs)] for key in FIGURES]
    heads = ["", *(program["program"] for program in programs)]
    if programs:
        table = Grid(heads, rows, "h" + "n" * len(programs))
        yield Topic("Logits of other programs", [table], brief=True)
    for program in programs:
        name = program["program"]
        layers = view.listing(program["by_layer"], ("module", "relative"), "cn")
        yield Topic(f"States of {name}", [layers])
        tried = view.listing(program["tried"], ("guess", "kl_nats_per_token"), "tn", "All mistakes")
        yield Topic(f"Mistakes that were tried on {name}", [tried])
