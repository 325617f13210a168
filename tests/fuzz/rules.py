"""What must hold of every answer, whatever was asked."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_SENTENCE = 2100
LONGEST_BOX = 5000
"""Beyond three times the arguments: the box in which a wrong option is shown quotes them."""
WRITERS = ("grow", "convert", "shrink", "run", "demo")
NAMED = ("--report",)
FLAGS = ("--json", "--dry-run", "--overwrite", "--trainability", "--no-verify")


@dataclass
class Answer:
    """What a command did.

    Attributes:
        code: its exit code.
        stdout: what it printed there.
        stderr: what it printed there, other libraries included.
        made: paths that are new, relative to the place.
        touched: paths that were there and are not as they were.
        strays: files that were made or changed outside of the place, and what was run or called.
        crash: what escaped from the command, if anything did.
    """

    code: int | None
    stdout: str
    stderr: str
    made: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    crash: str = ""


@dataclass(frozen=True)
class Fault:
    """A rule that an answer breaks.

    Attributes:
        kind: the same for faults of the same cause, as far as one can tell.
        detail: what was seen.
    """

    kind: str
    detail: str


def judge(arguments: tuple[str, ...], answer: Answer) -> Fault | None:
    """The first rule that is broken; None if all hold."""
    if answer.crash or "Traceback" in answer.stderr or "internal error" in answer.stderr:
        trace = answer.crash or answer.stderr
        return Fault(f"traceback {cause(trace)}", trace[-3000:])
    if answer.strays:
        first = re.sub(r"/\S*/", "…/", answer.strays[0])
        return Fault(f"stray {first[:60]}", "\n".join(answer.strays[:10]))
    if answer.touched:
        return Fault(f"touched {answer.touched[0][:60]}", "\n".join(answer.touched[:10]))
    if "memory ran out" in answer.stderr:
        return Fault("memory ran out", answer.stderr)
    if answer.code == 2:
        return _refusal(arguments, answer)
    if answer.code in (0, 1):
        return _result(arguments, answer)
    return Fault(f"exit code {answer.code}", answer.stderr[-2000:])


def says(arguments: tuple[str, ...], flag: str) -> bool:
    """Whether a flag is given, and is not the value of the option before it."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(
        word == flag and (before in FLAGS or not before.startswith("--"))
        for before, word in zip(("", *words), words, strict=False)
    )


def cause(trace: str) -> str:
    """Where in growkit a traceback ends, and with what."""
    frames = re.findall(r'File ".*?/growkit/([\w/]+\.py)", line \d+,? in (\w+)', trace)
    errors = re.findall(r"^([\w.]*(?:Error|Exception|Exit|Warning|Interrupt)\w*)", trace, re.M)
    # faulthandler puts the last call first, a traceback puts it last
    at = 0 if "most recent call first" in trace else -1
    place = ":".join(frames[at]) if frames else "nowhere"
    return f"{errors[-1] if errors else '?'} in {place}"


def _refusal(arguments: tuple[str, ...], answer: Answer) -> Fault | None:
    text = answer.stderr
    if answer.made:
        return Fault("refused, but wrote", f"{answer.made[:10]}\n{text}")
    box = text.startswith(("Usage: ", "╭─ Error"))
    if not (box or arguments in ((), ("recipes",))):
        if answer.stdout:
            return Fault("refused, but printed", answer.stdout[:1000] + text)
        if not text.startswith("error: ") or not text.endswith("\n"):
            return Fault(f"no sentence {_words(text)}", text[:2000])
        if text.count("\n") != 1:
            return Fault(f"several lines {_words(text)}", text[:2000])
        if len(text) > LONGEST_SENTENCE:
            return Fault(f"long sentence {_words(text)}", f"{len(text)} characters: {text[:500]}")
        return _unprintable(text)
    if len(text) > LONGEST_BOX + 3 * sum(map(len, arguments)):
        return Fault("long box", f"{len(text)} characters: {text[:500]}")
    steering = sorted(set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)))
    return Fault("a box steers the terminal", f"{steering} in {text!r}") if steering else None


def _result(arguments: tuple[str, ...], answer: Answer) -> Fault | None:
    command = arguments[0] if arguments else ""
    help_asked = bool({"-h", "--help", "--version"} & set(arguments))
    if answer.stderr:
        return Fault(f"spilled {_words(answer.stderr)}", answer.stderr[:2000])
    content: Any = None
    if says(arguments, "--json") and command not in ("recipes", "") and not help_asked:
        try:
            content = json.loads(answer.stdout, parse_constant=_no_constant)
        except ValueError as error:
            return Fault("no JSON", f"{error}: {answer.stdout[:1000]}")
    elif unprintable := _unprintable(answer.stdout):
        return unprintable
    if answer.code == 1 and (command not in (*WRITERS, "verify") or says(arguments, "--dry-run")):
        return Fault(f"exit code 1 of {command}", answer.stdout[:1000])
    return _made(arguments, answer, content)


def _made(arguments: tuple[str, ...], answer: Answer, content: Any) -> Fault | None:
    """Only what a command was told to make is new."""
    command = arguments[0] if arguments else ""
    allowed = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word in NAMED]
    dry = says(arguments, "--dry-run")
    if command in WRITERS and not dry and content:
        output = Path(content["output"])
        allowed.append(output.name)
        allowed += [parent.name for parent in output.parents]
    if command == "recipes":
        allowed += [f"{word}.yaml" for word in arguments]
    else_made = [path for path in answer.made if not set(Path(path).parts) & set(allowed)]
    known = content is not None or command not in WRITERS or dry
    if else_made and known:
        return Fault(f"made {else_made[0][:60]}", "\n".join(else_made[:10]))
    return None


def _unprintable(text: str) -> Fault | None:
    for line in text.split("\n"):
        if not line.isprintable():
            found = next(c for c in line if not c.isprintable())
            return Fault(f"unprintable {_words(text)}", f"{found!r} in {text[:1000]!r}")
    return None


def _words(text: str) -> str:
    """The first words of a sentence, without what it quotes."""
    plain = re.sub(r"'[^']*'?|\"[^\"]*\"?|\S*[/\d\\]\S*", "…", text)
    return " ".join(word[:20] for word in re.findall(r"[A-Za-z_…]+", plain)[:9])


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
