"""The dtypes that KV bytes can have, named without torch.

The coordinator and every pure module speak of dtypes through `KVDtype`, so that none of them loads torch;
`torch_dtypes.py` translates at the border.
"""

from enum import Enum


class KVDtype(str, Enum):
    """One element type of cached KV. The value is torch's name of it."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    UINT8 = "uint8"
    INT8 = "int8"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZES[self]


_ITEMSIZES = {
    KVDtype.FLOAT16: 2,
    KVDtype.BFLOAT16: 2,
    KVDtype.FLOAT32: 4,
    KVDtype.UINT8: 1,
    KVDtype.INT8: 1,
    KVDtype.FLOAT8_E4M3FN: 1,
    KVDtype.FLOAT8_E5M2: 1,
}
