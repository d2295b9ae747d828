"""Measure the peak of the CPU allocator in a step of one process."""

import gc
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.options import ActivationCheckpointing


def peak_of_step(module: LightningModule, batch: Any, *, recomputes: bool = False, precision: str = "32-true") -> int:
    """Return the bytes of all tensors at the peak of the second of two steps in Lightning's order."""
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    if recomputes:
        checkpoint_units(module, ActivationCheckpointing())
    optimizer: Any = module.configure_optimizers()
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer[0]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss: Any = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        del loss
        optimizer.step()

    step()
    optimizer.zero_grad()  # the profiler does not count what was allocated before and is freed later
    gc.collect()
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    tensors += batch if isinstance(batch, tuple) else [batch]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
        step()
    now = peak = 0
    events: list[Any] = list(profiled.profiler.kineto_results.events())  # type: ignore[union-attr]
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return sum(storages.values()) + peak
