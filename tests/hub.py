"""A stand-in for the Hub: the few answers that huggingface_hub asks of it, from folders."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

ABOUT = re.compile(r"/api/models/(org/\w+)(?:/revision/([^/]+))?")
TREE = re.compile(r"/api/models/(org/\w+)/tree/([^/]+)")
FILE = re.compile(r"/(org/\w+)/resolve/([^/]+)/(.+)")


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        """A client that has gone is no fault here."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve; gives the address without a slash at its end."""
    server = _Quiet(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class StandIn:
    """The models of a hub.

    Attributes:
        models: by their names the commits of each, with a folder; ``main`` is the last one.
        gated: names of models that nobody may read.
        asked: the paths that were asked for.
        broken: answer nothing but 500.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.broken = False

    def add(self, name: str, folder: Path) -> str:
        """A new commit of a model; returns its hash."""
        commit = hashlib.sha1(f"{name}{folder}".encode()).hexdigest()
        self.models.setdefault(name, {})[commit] = folder
        return commit

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        self.asked.append(path)
        kinds = {ABOUT: self._about, TREE: self._tree, FILE: self._file}
        for pattern, kind in kinds.items():
            match = pattern.fullmatch(path)
            if match and not self.broken:
                return self._of_model(match, kind)
        return 500 if self.broken else 404, b"", {}

    def _of_model(self, match: re.Match[str], kind: Any) -> tuple[int, bytes, dict[str, str]]:
        name, revision, *file = match.groups()
        if name not in self.models:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        commits = self.models[name]
        commit = list(commits)[-1] if revision in (None, "main") else revision
        if commit not in commits:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if file and name in self.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        return kind(name, commit, commits[commit], *file)

    def _about(self, name: str, commit: str, folder: Path) -> tuple[int, bytes, dict[str, str]]:
        siblings = [{"rfilename": each} for each in _files(folder)]
        return _json({"id": name, "sha": commit, "siblings": siblings})

    def _tree(self, name: str, commit: str, folder: Path) -> tuple[int, bytes, dict[str, str]]:
        return _json(
            [
                {"type": "file", "path": each, "size": file.stat().st_size, "oid": _etag(file)}
                for each, file in _files(folder).items()
            ]
        )

    def _file(
        self, name: str, commit: str, folder: Path, file: str
    ) -> tuple[int, bytes, dict[str, str]]:
        path = folder / file
        if not path.is_file():
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        known = {"X-Repo-Commit": commit, "ETag": f'"{_etag(path)}"'}
        return 200, path.read_bytes(), known


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[StandIn]:
    """A hub that huggingface_hub asks in here, with an empty cache."""
    hub = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            status, body, headers = hub.answer(unquote(self.path.partition("?")[0]))
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with served(Handler) as endpoint:
        for key, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, key, value)
        yield hub


def _files(folder: Path) -> dict[str, Path]:
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): each for each in files}


def _json(content: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
