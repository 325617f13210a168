"""One input: what is odd in a place, and the command that runs there."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.places import Place

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        place: name of the place that it is put into.
        arguments: the command line; paths are relative to the place.
        files: what is odd, by path in the place; see ``Place.put``.
    """

    place: str
    arguments: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)

    def put(self, place: Place) -> None:
        """Put the odd things where they belong."""
        for name, content in self.files.items():
            place.put(name, content)

    def as_json(self) -> dict[str, Any]:
        """The input as it stands in the corpus."""
        return {
            "place": self.place,
            "arguments": list(self.arguments),
            "files": {name: _written(content) for name, content in self.files.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Case:
        """See ``as_json``."""
        files = {name: _read(content) for name, content in content["files"].items()}
        return cls(content["place"], tuple(content["arguments"]), files)


def corpus() -> dict[str, Case]:
    """Every input that ever broke something, by the name of its file."""
    return {
        file.stem: Case.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(CORPUS.glob("*.json"))
    }


def _written(content: Any) -> dict[str, Any]:
    if not isinstance(content, bytes):
        return dict(content)
    if len(content) < 4096:
        try:
            return {"text": content.decode("utf-8")}
        except UnicodeDecodeError:
            pass
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _read(content: dict[str, Any]) -> Any:
    if "text" in content:
        return content["text"].encode("utf-8")
    if "zlib" in content:
        return zlib.decompress(base64.b64decode(content["zlib"]))
    return content
