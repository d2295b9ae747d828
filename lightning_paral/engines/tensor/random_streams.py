"""Random numbers on split activations: each rank draws its own, and all ranks continue with equal ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_paral.distributed.rng_state import derive_seed, seed_torch, set_torch_states, torch_states

_MODULUS = 2**63 - 1


class SplitStreams:
    """Switches torch's global generators between numbers that all tensor ranks draw and those of this rank.

    Activations that every rank has in full need equal dropout masks on all ranks. Those of which each rank has a part
    need masks of their own. Recomputed activations get the same masks again.

    Args:
        rank: the tensor rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @contextmanager
    def own_draws(self) -> Iterator[None]:
        """Draw this rank's numbers inside the block. Their seed is drawn from the numbers of all tensor ranks."""
        seed = int(torch.randint(_MODULUS, (), device="cpu"))
        shared = torch_states()
        seed_torch(derive_seed(seed, self._rank))
        try:
            yield
        finally:
            set_torch_states(shared)
