"""On gloo, a large all-gather is made in pieces, and gathers the same."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist


def gather(num_elements: int, most_bytes: int) -> tuple[list[float], int]:
    """Return what this rank has gathered in place, and the number of calls of torch's collective for lists."""
    from lightning_paral.compat.deepspeed.engine import disable_shared_memory
    from lightning_paral.engines.zero import process

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    output = torch.full((num_elements * num_ranks,), -1.0)
    own = output[rank * num_elements : (rank + 1) * num_elements]
    own.copy_(torch.arange(num_elements) + 1000.0 * rank)
    disable_shared_memory()  # it would be compiled
    backend = process.gloo_backend()("gloo", timedelta(0), None)
    with (
        patch.object(process, "_MAX_GATHERED_BYTES", most_bytes),
        patch.object(dist, "all_gather", wraps=dist.all_gather) as called,
    ):
        backend.all_gather_into_tensor(output, own)
    return output.tolist(), called.call_count


@pytest.mark.parametrize(("most_bytes", "num_calls"), [(10**6, 0), (300, 7), (1, 173)])
def test_pieces_are_the_whole(on_ranks: Callable[..., list[Any]], most_bytes: int, num_calls: int) -> None:
    expected = [1000.0 * rank + number for rank in range(3) for number in range(173)]

    for found, calls in on_ranks(3, gather, 173, most_bytes):
        assert found == expected
        assert calls == num_calls
