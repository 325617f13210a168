"""int8 of bitsandbytes: each row is scaled so that its largest number is 127.

LLM.int8(), arXiv 2208.07339. https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme

OVER_127 = 7.874015718698502e-3
"""1/127, with the digits that the library uses."""


class Bitsandbytes8bit(Scheme):
    """See the module."""

    method = "bitsandbytes"
    title = "bitsandbytes in 8 bits"
    suffixes = (".SCB", ".weight", ".weight_format")

    def applies(self, settings: Config) -> bool:
        """See ``Scheme``; older settings do not name the method."""
        named = super().applies({"quant_method": self.method} | settings)
        return named and bool(settings.get("load_in_8bit"))

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``."""
        shape = parts.shape(".weight")
        parts.check(".weight", shape, "I8")
        parts.require(len(shape) == 2, f"weights of shape {list(shape)} and rows")
        parts.check(".SCB", shape[:1], "F32")
        if ".weight_format" in parts:
            parts.check(".weight_format", (), "U8")
            parts.require(not int(parts.read(".weight_format")), "weight_format and rows")
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; float32."""
        return parts.read(".weight", rows) * parts.read(".SCB", rows)[:, None] * OVER_127


FORMAT = Bitsandbytes8bit()
