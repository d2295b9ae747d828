"""Random numbers in a pipeline: equal on all stages outside of the chain, different on each stage inside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.compat.torch.tensors import TorchDispatchMode, tree_leaves
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

    @contextmanager
    def of_pass(self, micro_batch: int) -> Iterator[None]:
        """Run the forward pass of a micro-batch in the block."""
        self._micro_batch = micro_batch
        with ExitStack() as self._until_end:
            yield

    def enter_units(self) -> None:
        """Let the units of this stage draw other numbers than those of other stages, until the pass ends."""
        self._until_end.callback(set_torch_states, torch_states())
        drawn = int(torch.randint(_MODULUS, (), device="cpu"))
        seed_torch(derive_seed(drawn, self._stage, self._module.trainer.fit_loop.total_batch_idx, self._micro_batch))


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the random numbers of a pass over two samples, and repeats those of each sample in further passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[list[Any], Tensor]] = []
        """The numbers among the arguments of each operation that draws, and a result."""
        self.are_repeated = True
        """Whether further passes have drawn what could be repeated, and nothing else."""
        self._sample: int | None = None

    @contextmanager
    def of_sample(self, sample: int | None) -> Iterator[None]:
        """In the block, repeat the numbers of the first or the second sample; note those of both if it is `None`."""
        self._sample, self._remaining = sample, list(self.noted)
        with self:
            yield
        self.are_repeated &= not self._remaining

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. If it draws random numbers, note them, or replace them by those of the sample."""
        result = func(*args, **(kwargs or {}))
        numbers = [each for each in args if isinstance(each, int | float)]
        if func is torch.ops.aten.multinomial.default:
            numbers += args[0].shape
        if torch.Tag.nondeterministic_seeded in func.tags and numbers != [_MODULUS]:
            for tensor in filter(torch.is_tensor, tree_leaves(result)):
                if self._sample is None:
                    self.noted.append((numbers, tensor.clone()))
                else:
                    self._repeat(numbers, tensor)
        return result

    def _repeat(self, numbers: list[Any], tensor: Tensor) -> None:
        of_both, drawn = self._remaining.pop(0) if self._remaining else (None, tensor)
        for dim, size in enumerate(tensor.shape[: drawn.dim()]):
            if drawn.shape[dim] != size:
                drawn = drawn.chunk(2, dim)[-(self._sample or 0)]
        # With other numbers, these may be positions among two samples, as of randperm, which do not exist for one.
        self.are_repeated &= of_both == numbers and drawn.shape == tensor.shape
        if self.are_repeated:
            tensor.copy_(drawn)
