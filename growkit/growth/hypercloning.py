"""HyperCloning: every space of the model is copied as a whole.

Samragh et al., "Scaling Smart: Accelerating Large Language Model Pre-training with Small Model
Initialization", arXiv 2409.12903. The coefficients here are powers of two rather than 1/n, so that
no weight is rounded: three copies read ¼, ¼ and ½ of a weight.
"""

from __future__ import annotations

from growkit.growth.copying import CopyMethod
from growkit.growth.method import SizeOption

METHOD = CopyMethod(
    name="hypercloning",
    summary="copy hidden, ffn, heads and KV heads by whole factors",
    paper="https://arxiv.org/abs/2409.12903",
    promise="exact",
    options=(
        SizeOption("hidden", ("hidden",), "hidden size"),
        SizeOption("ffn", ("ffn",), "MLP size; follows --hidden", "hidden"),
        SizeOption(
            "heads",
            ("heads", "signal_heads", "noise_heads"),
            "attention heads (signal and noise alike); follow --hidden",
            "hidden",
        ),
        SizeOption(
            "kv_heads",
            ("kv_heads",),
            "key-value heads; follow --heads (stay under group-diff)",
            "heads",
        ),
    ),
)
