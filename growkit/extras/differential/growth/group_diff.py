"""Group-differentiated growth: signal heads are copied, noise heads need not be.

"Grouped Differential Attention", arXiv 2510.06949, section 3.2 and table 3. Copies of a signal head
stay in its group: they share its noise head, key and value, and ``o_proj`` reads each of them with
a part of the weight. The coefficients are powers of two, so that no weight is rounded.
"""

from growkit.operations.growth.copying import CopyMethod
from growkit.planning.operation import SizeOption

OPERATION = CopyMethod(
    name="group-diff",
    paper="https://arxiv.org/abs/2510.06949",
    sizes=(
        SizeOption("hidden", "hidden size", axes=("hidden",)),
        SizeOption("ffn", "MLP size; follows --hidden", axes=("ffn",), follows="hidden"),
        SizeOption(
            "signal_heads", "signal heads of differential attention", axes=("signal_heads",)
        ),
        SizeOption("noise_heads", "noise heads of differential attention", axes=("noise_heads",)),
        SizeOption("kv_heads", "key-value heads", axes=("kv_heads",)),
    ),
    needs=("signal_heads", "noise_heads"),
)
