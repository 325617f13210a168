"""How often experts are chosen on a text, and how many copies follow from that.

The model is streamed from its files, one layer at a time, and its own router chooses.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.base.settings import Settings
from growkit.base.tensors import TORCH_NAMES, Weights, main_dtype

WINDOWS = 64
"""Windows of the text in which choices are counted: 32,768 tokens of 512 each."""


def copies_by_use(source: Weights, text: str, present: int, count: int) -> list[list[int]]:
    """The number of copies of each expert, by layers that have experts.

    All have one. Each further copy is for the expert with the most tokens per copy so far.

    Args:
        source: a model with experts.
        text: path of a UTF-8 text.
        present: number of experts.
        count: number of all copies in a layer.

    Raises:
        InputError: the text or the model cannot be used, or the class does not hand its choice to
            its experts.
    """
    from growkit.engine.calls import Call
    from growkit.engine.layerwise import Layerwise
    from growkit.engine.prompts import make_prompts

    folder = Path(source.where())
    windows = make_prompts(Settings(text, WINDOWS), folder, source.config).windows
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, TORCH_NAMES[main_dtype(source.tensors)])
    model, used = Layerwise(source, dtype, device, None), torch.zeros(present, dtype=torch.long)

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and not each.is_floating_point():
                used.add_(each.flatten().bincount(minlength=present)[:present].cpu())

    for module in model.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(look, with_kwargs=True)
    found = []
    for _ in model.stages([Call(window) for window in windows]):
        if used.any():
            found.append(_shared_out(used.tolist(), count))
            used.zero_()
    if not found:
        raise InputError(
            f"{type(model.model).__name__} does not show which experts it chooses; say how often "
            "each is copied (copies), or leave out calibration"
        )
    return found


def _shared_out(used: Sequence[int], count: int) -> list[int]:
    """Numbers of copies, at least one, with this sum."""
    copies = [1] * len(used)
    for _ in range(count - len(used)):
        most = max(range(len(used)), key=lambda expert: used[expert] / copies[expert])
        copies[most] += 1
    return copies
