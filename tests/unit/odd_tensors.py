"""Tensors that are not what they seem."""

import torch


def memory_given_back(tensor: torch.Tensor, *, nbytes_left: int = 0) -> torch.Tensor:
    """`tensor`, whose shape is as before, after its memory was freed under it (as when weights are put to sleep)."""
    tensor.untyped_storage().resize_(nbytes_left)
    return tensor
