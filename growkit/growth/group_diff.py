"""Group-differentiated growth: signal heads are copied, noise heads need not be.

"Grouped Differential Attention", arXiv 2510.06949, section 3.2 and table 3. Copies of a signal head
stay in its group: they share its noise head, key and value, and ``o_proj`` reads each of them with
a part of the weight. The coefficients are powers of two, so that no weight is rounded.
"""

from __future__ import annotations

from growkit.growth.copying import CopyMethod
from growkit.growth.method import SizeOption

METHOD = CopyMethod(
    name="group-diff",
    summary="copy hidden, ffn and signal heads; noise and KV heads stay unless they are given",
    paper="https://arxiv.org/abs/2510.06949",
    promise="exact",
    options=(
        SizeOption("hidden", ("hidden",), "hidden size"),
        SizeOption("ffn", ("ffn",), "MLP size; follows --hidden", "hidden"),
        SizeOption("signal_heads", ("signal_heads",), "signal heads of differential attention"),
        SizeOption("noise_heads", ("noise_heads",), "noise heads of differential attention"),
        SizeOption("kv_heads", ("kv_heads",), "key-value heads"),
    ),
    needs=("signal_heads", "noise_heads"),
)
