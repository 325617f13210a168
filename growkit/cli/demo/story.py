"""The demo: grow the shipped model from 1:1 to 4:1, prove it, and let both models write."""

from __future__ import annotations

from pathlib import Path

from growkit.base.progress import Progress, Silent
from growkit.base.settings import Settings
from growkit.checkpoint.scratch import temporary
from growkit.cli.demo.text import held_out_text
from growkit.pipeline.running import grow
from growkit.results.operation import Story

MODEL = Path(__file__).parent / "model"
OPENING = 'The "for" statement is used to'
NEW_BYTES = 160


def tell(
    output: Path | None = None,
    hidden: str = "x2",
    signal_heads: str = "x4",
    overwrite: bool = False,
    progress: Progress = Silent(),
) -> Story:
    """Run the demo.

    Args:
        output: where to keep the grown model; None to throw it away.
        hidden: factor or size of the hidden space; the MLP follows.
        signal_heads: factor or number of signal heads; noise and KV heads stay.
        overwrite: replace an earlier output.
        progress: where progress is shown.

    Raises:
        InputError: the size or the output cannot be used.
    """
    with temporary("demo") as scratch:
        text = scratch / "held_out.txt"
        text.write_text(held_out_text(), encoding="utf-8")
        folder = output or scratch / "grown"
        growth = grow(
            MODEL,
            folder,
            method="group-diff",
            hidden=hidden,
            signal_heads=signal_heads,
            overwrite=overwrite,
            verify=Settings(text=str(text), prompts=8, length=512),
            progress=progress,
        )
        written = Path(growth["output"])
        return Story(
            growth=growth,
            opening=OPENING,
            before=_continue(MODEL),
            after=_continue(written),
            kept_in=str(written) if output else None,
        )


def _continue(folder: Path) -> str:
    """A greedy continuation, in float32."""
    import torch
    from transformers import AutoTokenizer

    from growkit.engine.oracle import load_model

    model = load_model(folder, torch.float32, torch.device("cpu"), None)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    asked = tokenizer(OPENING, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=NEW_BYTES, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return str(tokenizer.decode(answer[0, asked["input_ids"].shape[1] :]))
