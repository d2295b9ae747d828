"""Peak bytes of activations in a training step of the example's GPT, with and without activation checkpointing.

    python -m tests.benchmarks.activation_memory

Counted from the live tensors: the most that forward and backward had alive at once beyond what was there before the
step, without the gradients of parameters.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from examples.gpt import GPT
from lightning_paral import ActivationCheckpointing
from lightning_paral.model.activation_checkpointing import checkpoint_units
from tests.benchmarks.common import print_table

BATCH_SIZE, CONTEXT = 16, 128
DEPTHS = (8, 64)
"""Numbers of blocks."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created inside the context that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {
            value.untyped_storage()._cdata for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)
        }
        for result in tree_flatten(results)[0]:
            storage = result.untyped_storage() if isinstance(result, Tensor) else None
            if storage is not None and storage._cdata not in known and storage._cdata not in self._seen:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalizer = weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
                self._seen[storage._cdata] = finalizer
        return results

    def _freed(self, key: int, num_bytes: int) -> None:
        self.now -= num_bytes
        self._seen.pop(key, None)


def peak_bytes(num_layers: int, options: ActivationCheckpointing | None) -> int:
    """Return the peak bytes of one step, without gradients of parameters."""
    torch.manual_seed(0)
    model = GPT(num_layers=num_layers, context=CONTEXT)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # allocated before, so that gradients are added in place
    if options is not None:
        checkpoint_units(model, options)
    batch = torch.randint(256, (2, BATCH_SIZE, CONTEXT))
    with LiveBytes() as live:
        model.loss((batch[0], batch[1])).backward()
    return live.peak


def main() -> None:
    """Print the table."""
    rows = []
    for depth in DEPTHS:
        kept, recomputed = peak_bytes(depth, None), peak_bytes(depth, ActivationCheckpointing())
        rows.append([depth, kept / 1e6, recomputed / 1e6, kept / recomputed])
    print(f"GPT of width 128, batch {BATCH_SIZE} x {CONTEXT}, fp32; peaks in MB")
    print_table(("blocks", "all kept", "inputs of blocks kept", "ratio"), rows, ("g", *[".1f"] * 3))


if __name__ == "__main__":
    main()
