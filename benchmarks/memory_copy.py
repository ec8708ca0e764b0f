"""The two plain copies of memory that stand beside every copy we make: torch's and libc's.

Apart from `measure`, because only this needs torch. Both copy between the same two warm buffers. torch splits a copy
over its threads (`torch.get_num_threads()`), libc uses one.
"""

import ctypes

import torch

from benchmarks.measure import Case

TORCH_COPY = "memory_copy_torch"
LIBC_COPY = "memory_copy_libc"


def memory_copies(nbytes: int) -> dict[str, Case]:
    """The cases `TORCH_COPY` (`Tensor.copy_`) and `LIBC_COPY` (`memmove`) over `nbytes`; they hold 2 * nbytes."""
    source = torch.ones(nbytes, dtype=torch.uint8)  # ones and not zeros: every page is really there
    target = torch.ones(nbytes, dtype=torch.uint8)

    def libc_copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    return {TORCH_COPY: lambda: target.copy_(source), LIBC_COPY: libc_copy}
