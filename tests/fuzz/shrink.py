"""From an input that breaks a rule to a smaller one that breaks it in the same way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.worker import Worker

MOST = 60
"""Inputs that are tried."""


def shrink(worker: Worker, case: Case, kind: str) -> Case:
    """A smaller input of the same kind of fault."""
    tries = 0
    better = True
    while better:
        better = False
        for smaller in _smaller(worker, case):
            tries += 1
            if tries > MOST:
                return case
            found = worker.run(lambda number, tried=smaller: ("", tried), 0, 1).found
            if found and found[0].fault.kind == kind:
                case, better = smaller, True
                break
    return case


def _smaller(worker: Worker, case: Case) -> Iterator[Case]:
    for name in case.files:
        yield replace(case, files={n: c for n, c in case.files.items() if n != name})
    for at in range(len(case.arguments) - 1, 2, -1):
        if case.arguments[at] not in ("--dry-run", "--no-verify", "--json"):
            yield replace(case, arguments=case.arguments[:at] + case.arguments[at + 1 :])
    for name, content in case.files.items():
        for tree in _fewer_changes(content, worker.places[case.place].files.get(name)):
            written = json.dumps(tree, indent=1).encode()
            yield replace(case, files=case.files | {name: written})


def _fewer_changes(content: Any, sound: tuple[bytes, int] | None) -> Iterator[dict[str, Any]]:
    try:
        was, now = json.loads(sound[0] if sound else b"{}"), json.loads(content)
    except (TypeError, ValueError, RecursionError):
        return
    if not isinstance(was, dict) or not isinstance(now, dict):
        return
    for key in sorted(was.keys() | now.keys()):
        if key not in was:
            yield {k: v for k, v in now.items() if k != key}
        elif was[key] != now.get(key):
            yield now | {key: was[key]}
