"""The demo: grow the shipped model from 1:1 to 4:1, prove it, and let both models write.

Its text is Python's own help topics, which every Python installation has. The topics repeat each
other (``compound`` contains ``if``) and differ between Python versions. So a hash of the paragraph
alone decides whether a paragraph is held out: the decision is the same in every topic and version,
and the model was trained on no held-out paragraph.
"""

import zlib
from pathlib import Path
from pydoc_data.topics import topics

from growkit.base.progress import Progress
from growkit.base.settings import Settings
from growkit.model.checkpoint.scratch import temporary
from growkit.results.growth_result import Story

MODEL = Path(__file__).parent / "model"
OPENING = 'The "for" statement is used to'
NEW_BYTES = 160
HELD_OUT_ONE_IN = 10


def run_demo(
    output: Path | None, hidden: str, signal_heads: str, overwrite: bool, progress: Progress
) -> Story:
    """Run the demo.

    Args:
        output: folder of the grown model; None to delete the model.
        hidden: factor or size of the hidden space; the MLP follows.
        signal_heads: factor or number of signal heads; noise and KV heads stay.
        overwrite: whether to replace an earlier output.
        progress: receives the progress.

    Raises:
        InputError: the size or the output cannot be used.
    """
    from growkit.pipeline.running import grow

    with temporary("demo") as scratch:
        text = scratch / "held_out.txt"
        text.write_text(held_out_text(), encoding="utf-8")
        growth = grow(
            MODEL,
            output or scratch / "grown",
            method="group-diff",
            hidden=hidden,
            signal_heads=signal_heads,
            overwrite=overwrite,
            verify=Settings(text=str(text), prompts=8, length=512),
            progress=progress,
        )
        return Story(
            growth=growth,
            opening=OPENING,
            before=_continuation(MODEL),
            after=_continuation(Path(growth["output"])),
            kept_in=growth["output"] if output else None,
        )


def _continuation(folder: Path) -> str:
    """The greedy continuation of the opening, in float32."""
    import torch

    from growkit.engine.prompts import load_tokenizer
    from growkit.engine.transformers_class import load_model

    model = load_model(folder, torch.float32, torch.device("cpu"), None)
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer(OPENING, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=NEW_BYTES, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :]))


def training_text() -> str:
    """The paragraphs that the demo model is trained on, nine tenths of all."""
    return _text(held_out=False)


def held_out_text() -> str:
    """The paragraphs that the demo model has never seen, a tenth of all."""
    return _text(held_out=True)


def _text(*, held_out: bool) -> str:
    every = (topics[name].split("\n\n") for name in sorted(topics))
    paragraphs = dict.fromkeys(paragraph.strip("\n") for topic in every for paragraph in topic)
    return "\n\n".join(
        paragraph
        for paragraph in paragraphs
        if paragraph and (zlib.crc32(paragraph.encode()) % HELD_OUT_ONE_IN == 0) is held_out
    )
