"""Links of the site to files outside of ``docs/``, which only the repository has."""

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
LEAVING = re.compile(r"(?<=\]\()(?:\.\./)+[^)\s]+")


def repository() -> str:
    """Where the files are: on GitHub at the commit of a workflow, or else in this checkout."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return DOCS.parent.as_uri()
    keys = ("SERVER_URL", "REPOSITORY", "SHA")
    server, name, commit = (os.environ[f"GITHUB_{key}"] for key in keys)
    return f"{server}/{name}/blob/{commit}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put addresses in place of the links of a page that leave ``docs/``; MkDocs calls this."""
    folder = (DOCS / page.file.src_uri).parent

    def address(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[0]))
        inside = path.is_relative_to(DOCS)
        return link[0] if inside else f"{repository()}/{path.relative_to(DOCS.parent).as_posix()}"

    return LEAVING.sub(address, markdown)
