"""HyperCloning: every space of the model is copied as a whole.

Samragh et al., "Scaling Smart: Accelerating Large Language Model Pre-training with Small Model
Initialization", arXiv 2409.12903. The coefficients here are powers of two rather than 1/n, so that
no weight is rounded: three copies read ¼, ¼ and ½ of a weight.
"""

from growkit.operations.growth.copying import CopyMethod
from growkit.planning.operation import SizeOption

OPERATION = CopyMethod(
    name="hypercloning",
    paper="https://arxiv.org/abs/2409.12903",
    sizes=(
        SizeOption("hidden", "hidden size", axes=("hidden",)),
        SizeOption("ffn", "MLP size; follows --hidden", axes=("ffn",), follows="hidden"),
        SizeOption(
            "heads",
            "attention heads (signal and noise alike); follow --hidden",
            axes=("heads", "signal_heads", "noise_heads"),
            follows="hidden",
        ),
        SizeOption(
            "kv_heads",
            "key-value heads; follow --heads (stay under group-diff)",
            axes=("kv_heads",),
            follows="heads",
        ),
    ),
)
