"""Random numbers in a pipeline: equal on all stages outside of the chain, different on each stage inside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

_States = tuple[Tensor, Tensor | None]
"""The state of the generator of the CPU, and on CUDA that of the device."""
_MODULUS = 2**63 - 1
_PRIMES = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9


class RandomStreams:
    """The states of torch's global generators in the forward passes of one stage.

    All stages run the code of a step before its first unit, so it must draw the same numbers there. The units of each
    stage then draw from a generator of their own, whose seed follows from the state of the global generator, the stage
    and the number of the pass. After the pass, the global generators continue where the first unit was called, so that
    they stay equal on all stages, and need no state but that which every checkpoint has.

    Args:
        module: the LightningModule.
        stage: the stage of this rank.
        device: the device of this rank.
    """

    def __init__(self, module: LightningModule, stage: int, device: torch.device) -> None:
        self._module = module
        self._stage = stage
        self._device = device
        self._micro_batch = 0
        self._shared: _States | None = None
        self._seeded: _States | None = None
        self._is_watching = self._units_have_drawn = False

    @contextmanager
    def watching(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether passes in the block have drawn numbers, in units or outside of them."""
        before, self._is_watching, self._units_have_drawn = self._states(), True, False
        try:
            yield lambda: self._units_have_drawn or not _are_equal(before, self._states())
        finally:
            self._is_watching = False

    @contextmanager
    def of_pass(self, micro_batch: int) -> Iterator[None]:
        """Run the forward pass of a micro-batch in the block."""
        self._micro_batch, self._shared, self._seeded = micro_batch, None, None
        try:
            yield
        finally:
            if self._seeded is not None and not _are_equal(self._seeded, self._states()):
                self._units_have_drawn = True
            if self._shared is not None:
                state, of_device = self._shared
                torch.set_rng_state(state)
                if of_device is not None:
                    torch.cuda.set_rng_state(of_device, self._device)

    def enter_units(self) -> None:
        """Let the units of this stage draw other numbers than those of other stages, until the pass ends."""
        on_cuda = self._device.type == "cuda"
        self._shared = self._states()
        drawn = int(torch.randint(_MODULUS, (), device="cpu"))
        trainer = self._module.trainer
        numbers = self._stage, trainer.fit_loop.total_batch_idx, self._micro_batch
        seed = (drawn + sum(n * prime for n, prime in zip(numbers, _PRIMES, strict=True))) % _MODULUS
        # torch.manual_seed takes milliseconds where other devices are not initialized: it keeps a traceback for each.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        if self._is_watching:
            self._seeded = self._states()

    def _states(self) -> _States:
        on_cuda = self._device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_cuda else None


def _are_equal(one: _States, other: _States) -> bool:
    return all(a is None or torch.equal(a, b) for a, b in zip(one, other, strict=True) if b is not None)
