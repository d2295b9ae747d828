"""Random numbers on split activations: each rank draws its own, and all ranks continue with equal ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_paral.distributed.rng_state import (
    derive_seed,
    digest_of_torch_state,
    seed_torch,
    set_torch_states,
    torch_states,
)

_MODULUS = 2**63 - 1


class SplitStreams:
    """Switches torch's global generators between numbers that all tensor ranks draw and those of this rank.

    Activations that every rank has in full need equal dropout masks on all ranks. Those of which each rank has a part
    need masks of their own. Either a single function draws them, inside `own_draws`, or, where code gets ordinary
    tensors with a rank's features, all functions between `enter` and `leave`. Recomputed activations get the same masks
    again.

    Args:
        rank: the tensor rank.
        batch_number: returns the number of the batch, which differs from step to step.
        is_active: returns whether numbers may be drawn: in training, if there is any dropout.
    """

    def __init__(self, rank: int, batch_number: Callable[[], int], is_active: Callable[[], bool]) -> None:
        self._rank = rank
        self._batch_number = batch_number
        self._is_active = is_active
        self._shared: list[Tensor] | None = None

    def enter(self, layer: int) -> None:
        """Draw this rank's numbers until `leave`. Do nothing if it does so already.

        Their seed follows from the state of the generator, the number of the batch, the layer and the rank. It does not
        change the state, so code outside draws the same numbers as without tensor parallelism.

        Args:
            layer: the number of the layer whose output is split.
        """
        if self._shared is not None or not self._is_active():
            return
        self._shared = torch_states()
        seed_torch(derive_seed(digest_of_torch_state(), self._batch_number(), layer, self._rank))

    def leave(self) -> None:
        """Continue with the numbers that all tensor ranks draw.

        Call it before each step as well: a step may have failed, or a hook may have called a layer of a chain alone.
        """
        if self._shared is None:
            return
        set_torch_states(self._shared)
        self._shared = None

    @contextmanager
    def own_draws(self) -> Iterator[None]:
        """Draw this rank's numbers inside the block. Their seed is drawn from the numbers of all tensor ranks."""
        if self._shared is not None:
            yield
            return
        seed = int(torch.randint(_MODULUS, (), device="cpu"))
        self._shared = torch_states()
        seed_torch(derive_seed(seed, self._rank))
        try:
            yield
        finally:
            self.leave()
