"""OLMo 3: OLMo 2 with a window in all but every fourth layer, if nothing else is said.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.layers import every, windows
from growkit.families.olmo2 import FAMILY as OLMO2

FAMILY = replace(
    OLMO2,
    name="OLMo 3",
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "layer_types": windows(every(4))},
)
