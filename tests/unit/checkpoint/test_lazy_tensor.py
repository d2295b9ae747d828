import pytest
import torch

from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk, flat_slices

ROWS = [Chunk((0, 0), (1, 6)), Chunk((1, 0), (3, 6))]
COLUMNS = [Chunk((0, 0), (4, 2)), Chunk((0, 2), (4, 4))]


@pytest.mark.parametrize("chunks", [ROWS, ROWS[::-1], COLUMNS], ids=["rows", "unordered", "columns"])
@pytest.mark.parametrize("max_bytes", [4, 28, 1000])
def test_flat_slices_are_the_elements_in_their_order(chunks: list[Chunk], max_bytes: int) -> None:
    values = torch.arange(24.0).view(4, 6)
    stored = [StoredChunk(chunk, lambda chunk=chunk: values[chunk.index]) for chunk in chunks]
    found = [found_slice.clone() for found_slice in flat_slices(LazyTensor((4, 6), torch.float32, stored), max_bytes)]
    assert torch.equal(torch.cat(found), values.flatten())
    assert all(found_slice.nbytes <= max_bytes for found_slice in found)
