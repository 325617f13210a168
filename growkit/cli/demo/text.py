"""The text of the demo: Python's own help topics, which every Python installation carries.

The topics repeat each other (``compound`` contains ``if``), and they differ between Python
versions. So the split is made paragraph by paragraph, by a hash of the paragraph alone: a paragraph
is on the same side in every topic and in every version, and nothing held out was ever trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pydoc_data.topics import topics

HELD_OUT_ONE_IN = 10


def _paragraphs() -> Iterator[tuple[str, bool]]:
    """Every distinct paragraph, in order, and whether it is held out."""
    seen = set()
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = paragraph.strip("\n")
            if text and text not in seen:
                seen.add(text)
                yield text, zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0


def training_text() -> str:
    """The nine tenths of the paragraphs that the demo model is trained on."""
    return "\n\n".join(text for text, held_out in _paragraphs() if not held_out)


def held_out_text() -> str:
    """The tenth of the paragraphs that the demo model has never seen."""
    return "\n\n".join(text for text, held_out in _paragraphs() if held_out)
