"""Numbers of copies of experts, from their use on a text.

The model is streamed from its files, one layer at a time, and its own router chooses experts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.base.settings import Settings
from growkit.base.tensors import TORCH_NAMES, Weights, main_dtype

WINDOWS = 64
"""Number of windows of the text: at 512 tokens each, choices for 32,768 tokens are counted."""


def copies_by_use(source: Weights, text: str, present: int, count: int) -> list[list[int]]:
    """Choose the number of copies of each expert, for every layer with experts.

    Every expert has one copy. Each further copy goes to the expert with the most tokens per copy.

    Args:
        source: a model with experts.
        text: path of a UTF-8 text.
        present: number of experts in a layer of the source.
        count: number of experts in a layer of the target.

    Raises:
        InputError: the text or the model cannot be used, or the class does not pass the chosen
            indices to its experts.
    """
    from growkit.engine.calls import Call
    from growkit.engine.layerwise import Layerwise
    from growkit.engine.prompts import make_prompts

    folder = Path(source.where())
    windows = make_prompts(Settings(text, WINDOWS), folder, source.config).windows
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, TORCH_NAMES[main_dtype(source.tensors)])
    model, used = Layerwise(source, dtype, device, None), torch.zeros(present, dtype=torch.long)

    def count_choices(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and not each.is_floating_point():
                used.add_(each.flatten().bincount(minlength=present)[:present].cpu())

    for module in model.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(count_choices, with_kwargs=True)
    found = []
    for _ in model.stages([Call(window) for window in windows]):
        if used.any():
            found.append(_copies(used.tolist(), count))
            used.zero_()
    if not found:
        raise InputError(
            f"{type(model.model).__name__} does not show which experts it chooses; give the number "
            "of copies of each (--copies) instead of --calibration"
        )
    return found


def _copies(used: Sequence[int], count: int) -> list[int]:
    """Distribute copies among experts, at least one to each."""
    copies = [1] * len(used)
    for _ in range(count - len(used)):
        most = max(range(len(used)), key=lambda expert: used[expert] / copies[expert])
        copies[most] += 1
    return copies
