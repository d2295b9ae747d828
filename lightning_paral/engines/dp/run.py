"""One run under DP: the threads of the replicas, and the steps that they run."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.engines.dp.step import ParallelStep
from lightning_paral.model.user_hooks import has_hook

_MAY_CHANGE_WEIGHTS_BEFORE_BACKWARD = (
    "on_before_zero_grad",
    "on_before_backward",
    "optimizer_zero_grad",
    "backward",
)


class DPRun:
    """Runs the steps of one run under DP, with a thread for each device except the first.

    Args:
        module: the module, on the first of `devices`; it is replica 0.
        devices: the devices of the replicas.
    """

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        self._threads = ThreadPoolExecutor(max(1, len(devices) - 1), thread_name_prefix="paral_dp")
        self._step = ParallelStep(module, devices, self._threads)
        self._copies_before_backward = has_hook(module, _MAY_CHANGE_WEIGHTS_BEFORE_BACKWARD)

    @property
    def num_running_replicas(self) -> int:
        """The number of replicas that run the current step; 0 if none is running, or if it runs on the module only."""
        return self._step.num_running

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step `name` of the module on the replicas, and return its output. See `ParallelStep.run`."""
        return self._step.run(name, *args, **kwargs)

    def backward(self, backward: Callable[..., Tensor], loss: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Run `backward(loss, *args, **kwargs)` through all replicas, free them, and return its result."""
        if self._copies_before_backward and loss.requires_grad:
            step = self._step
            # A hook on the loss, because it runs after `on_before_backward`, which may change weights.
            loss.register_hook(lambda _: step.copy_values())  # type: ignore[no-untyped-call]
        result = backward(loss, *args, **kwargs)
        self._step.forget()
        return result

    def end(self) -> None:
        """End the threads."""
        self._threads.shutdown()
