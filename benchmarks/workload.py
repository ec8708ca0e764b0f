"""What is stored and loaded in the engine benchmarks, equal for this project and for a peer.

One rank of Llama-8B at TP=4: 32 layers of bf16 with 2 KV heads of 128, chunks of 256 tokens (8 MiB), paged KV in blocks
of 16 tokens (8 KiB for a layer's keys or values). `NARROW` has one head of 64: a quarter of the bytes, in pieces of
2 KiB. Imports torch only: a peer's interpreter runs it as well.
"""

from dataclasses import dataclass

import torch

MODEL_NAME = "llama-8b"
CHUNK_SIZE = 256
BLOCK_SIZE = 16
_VOCABULARY = 128_256


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one rank, bf16."""

    num_layers: int
    num_heads: int
    head_size: int

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_size * torch.bfloat16.itemsize

    @property
    def piece_nbytes(self) -> int:
        """Bytes that lie side by side in the paged KV: one block of one layer's keys or values."""
        return BLOCK_SIZE * self.num_heads * self.head_size * torch.bfloat16.itemsize


WIDE = KVShape(num_layers=32, num_heads=2, head_size=128)
NARROW = KVShape(num_layers=32, num_heads=1, head_size=64)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in paged KV: it is stored from the rows `sources[order]` and loaded into the rows `targets[order]`.

    `order` is "random" (blocks in random order) or "contiguous" (one run of rows). Source and target rows are apart.
    """

    tokens: list[int]
    sources: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]

    @classmethod
    def of(cls, num_tokens: int) -> "Prompt":
        """The same prompt and rows in every process. `num_tokens` is a multiple of `CHUNK_SIZE`."""
        num_blocks = num_tokens // BLOCK_SIZE
        sources = {"random": _shuffled(num_blocks, 1), "contiguous": torch.arange(num_tokens)}
        targets = {"random": _shuffled(num_blocks, 2), "contiguous": torch.arange(num_tokens)}
        return cls(tokens(num_tokens), sources, {order: num_tokens + rows for order, rows in targets.items()})


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt, as an engine has them: the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _VOCABULARY, (num_tokens,), generator=generator).tolist()


def paged_kv(shape: KVShape, num_tokens: int) -> list[torch.Tensor]:
    """Paged KV with room for source and target rows of a prompt: one tensor of random bytes per layer."""
    num_blocks = 2 * num_tokens // BLOCK_SIZE
    dims = (2, num_blocks, BLOCK_SIZE, shape.num_heads, shape.head_size)
    generator = torch.Generator().manual_seed(3)
    layers = [torch.empty(dims, dtype=torch.int16) for _ in range(shape.num_layers)]
    return [layer.random_(generator=generator).view(torch.bfloat16) for layer in layers]


def _shuffled(num_blocks: int, seed: int) -> torch.Tensor:
    """The rows of all blocks, block by block in random order."""
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)
