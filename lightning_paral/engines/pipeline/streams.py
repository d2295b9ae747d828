"""Random numbers in a pipeline: equal on all stages outside of the chain, different on each stage inside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.distributed.rng_state import derive_seed, seed_torch, set_torch_states, torch_states

_MODULUS = 2**63 - 1


class RandomStreams:
    """The states of torch's global generators in the forward passes of one stage.

    All stages run the code of a step before its first unit, so it must draw the same numbers there. The units of each
    stage then draw from a generator of their own, whose seed follows from the state of the global generator, the stage
    and the number of the pass. After the pass, the global generators continue where the first unit was called, so that
    they stay equal on all stages, and need no state but that which every checkpoint has.

    Args:
        module: the LightningModule.
        stage: the stage of this rank.
    """

    def __init__(self, module: LightningModule, stage: int) -> None:
        self._module = module
        self._stage = stage
        self._micro_batch = 0
        self._shared: list[Tensor] | None = None
        self._seeded: list[Tensor] | None = None
        self._is_watching = self._units_have_drawn = False

    @contextmanager
    def watching(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether passes in the block have drawn numbers, in units or outside of them."""
        before, self._is_watching, self._units_have_drawn = torch_states(), True, False
        try:
            yield lambda: self._units_have_drawn or not _are_equal(before, torch_states())
        finally:
            self._is_watching = False

    @contextmanager
    def of_pass(self, micro_batch: int) -> Iterator[None]:
        """Run the forward pass of a micro-batch in the block."""
        self._micro_batch, self._shared, self._seeded = micro_batch, None, None
        try:
            yield
        finally:
            if self._seeded is not None and not _are_equal(self._seeded, torch_states()):
                self._units_have_drawn = True
            if self._shared is not None:
                set_torch_states(self._shared)

    def enter_units(self) -> None:
        """Let the units of this stage draw other numbers than those of other stages, until the pass ends."""
        self._shared = torch_states()
        drawn = int(torch.randint(_MODULUS, (), device="cpu"))
        seed_torch(derive_seed(drawn, self._stage, self._module.trainer.fit_loop.total_batch_idx, self._micro_batch))
        if self._is_watching:
            self._seeded = torch_states()


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))
