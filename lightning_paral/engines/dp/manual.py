"""Manual optimization in replicas: each call that changes gradients or parameters is made once for all replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_paral.data.parts import weighted_mean
from lightning_paral.engines.dp.rendezvous import Rendezvous
from lightning_paral.engines.dp.replicate import Replicas
from lightning_paral.errors import ConfigurationError


class BackwardPermit:
    """Decides whether gradients may flow into the master: only in a backward pass of all replicas together."""

    def __init__(self) -> None:
        self._granted = False

    def check(self) -> None:
        """Raise a `ConfigurationError` if gradients must not flow now."""
        if not self._granted:
            raise ConfigurationError(
                "A replica of paral_dp ran a backward pass of its own inside a step. Gradients of all replicas are "
                "computed together: call self.manual_backward(loss) under manual optimization, and "
                "torch.autograd.grad(loss, inputs) for gradients with respect to inputs; or use paral_ddp."
            )

    def grant(self) -> None:
        """Allow all later backward passes. Call it after the replicas have run the step."""
        self._granted = True

    @contextmanager
    def granted(self) -> Iterator[None]:
        """Allow backward passes inside the block."""
        before, self._granted = self._granted, True
        try:
            yield
        finally:
            self._granted = before


@contextmanager
def rejecting_replica_steps(rendezvous: Rendezvous) -> Iterator[None]:
    """Raise a `ConfigurationError` if a single replica steps an optimizer inside the block."""

    def check(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not rendezvous.is_running:
            raise ConfigurationError(
                "A replica of paral_dp stepped an optimizer on its own, so it would step once per replica. Take the "
                "optimizer from self.optimizers(); or use paral_ddp."
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class ManualOptimization:
    """Replaces the `LightningModule` methods for manual optimization in one replica.

    Every replica calls these methods, and each call runs once, on the master. Losses are weighted by the sizes of the
    sub-batches, so that gradients are those of the full batch.

    Args:
        master: the module whose parameters the optimizers hold.
        replica: the index of the replica.
        rendezvous: the rendezvous of all replicas of the step.
        replicas: the copies of the master; they are updated when its parameters change.
        sizes: the number of samples of each replica.
        device: the device of the master.
        permit: allows the backward pass of all replicas together.
    """

    def __init__(
        self,
        master: LightningModule,
        replica: int,
        rendezvous: Rendezvous,
        replicas: Replicas,
        sizes: Sequence[int],
        device: torch.device,
        permit: BackwardPermit,
    ) -> None:
        self._replica = replica
        self._rendezvous = rendezvous
        self._replicas = replicas
        self._sizes = sizes
        self._device = device
        self._permit = permit
        # The master's own methods, bound before they are replaced.
        self._own: dict[str, Callable[..., Any]] = {name: getattr(master, name) for name in _METHODS}

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements by method name."""
        return {name: getattr(self, name) for name in _METHODS}

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the weighted mean of the replicas' losses."""

        def backward(losses: list[Tensor]) -> None:
            with self._permit.granted():
                mean = weighted_mean(losses, self._sizes[: len(losses)], self._device)
                self._own["manual_backward"](mean, *args, **kwargs)

        self._rendezvous.run_once(self._replica, "self.manual_backward", loss, backward)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizers. If all replicas call `step` of one, it steps once."""
        found = self._own["optimizers"](use_pl_optimizer)
        if isinstance(found, list):
            return [_Optimizer(optimizer, self, index) for index, optimizer in enumerate(found)]
        return _Optimizer(found, self, 0)

    def replica_param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `groups` with the parameters of this replica, which have no gradients.

        Only replica 0 gets the original groups, so that a change to them is made once.
        """
        if self._replica == 0:
            return groups
        own = self._replicas.parameters_of_copy(self._replica - 1)
        return [group | {"params": [own.get(id(param), param) for param in group["params"]]} for group in groups]

    def lr_schedulers(self) -> Any:
        """Return the schedulers. If all replicas call `step` of one, it steps once."""
        found = self._own["lr_schedulers"]()
        if isinstance(found, list):
            return [_Scheduler(scheduler, self, index) for index, scheduler in enumerate(found)]
        return None if found is None else _Scheduler(found, self, 0)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """In all replicas, let only the parameters of `optimizer` require gradients."""
        self.run_once("self.toggle_optimizer", self._own["toggle_optimizer"], _unwrap(optimizer), new_parameters=True)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """In all replicas, restore the `requires_grad` that `toggle_optimizer` changed."""
        own = self._own["untoggle_optimizer"]
        self.run_once("self.untoggle_optimizer", own, _unwrap(optimizer), new_parameters=True)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of the full batch."""
        self.run_once("self.clip_gradients", self._own["clip_gradients"], _unwrap(optimizer), *args, **kwargs)

    def run_once(
        self, call: str, method: Callable[..., Any], *args: Any, new_parameters: bool = False, **kwargs: Any
    ) -> Any:
        """Run `method` once for all replicas, update their parameters if `new_parameters`, and return the result."""

        def run(_: list[None]) -> Any:
            result = method(*args, **kwargs)
            if new_parameters:
                self._replicas.copy_parameters()
            return result

        return self._rendezvous.run_once(self._replica, call, None, run)


_METHODS = (
    "manual_backward",
    "optimizers",
    "lr_schedulers",
    "toggle_optimizer",
    "untoggle_optimizer",
    "clip_gradients",
)


class _Optimizer:
    """An optimizer as a replica sees it: calls run once for all replicas."""

    def __init__(self, optimizer: Any, optimization: ManualOptimization, index: int) -> None:
        self._wrapped = optimizer
        self._optimization = optimization
        self._name = f"optimizer {index}"

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if isinstance(self._wrapped, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates its closure several times per step, which replicas cannot do together under manual "
                "optimization. Use automatic optimization, or paral_ddp."
            )
        result = None if closure is None else closure()
        self._optimization.run_once(f"{self._name}.step", self._wrapped.step, new_parameters=True, **kwargs)
        return result

    @property
    def optimizer(self) -> "_Optimizer":
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimization.replica_param_groups(self._wrapped.param_groups)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._optimization.run_once(f"{self._name}.zero_grad", self._wrapped.zero_grad, *args, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self._optimization.toggle_optimizer(self)
        yield
        self._optimization.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class _Scheduler:
    """A learning rate scheduler as a replica sees it: steps run once for all replicas."""

    def __init__(self, scheduler: Any, optimization: ManualOptimization, index: int) -> None:
        self._scheduler = scheduler
        self._optimization = optimization
        self._name = f"scheduler {index}"

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._optimization.run_once(f"{self._name}.step", self._scheduler.step, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def _unwrap(optimizer: Any) -> Any:
    return optimizer._wrapped if isinstance(optimizer, _Optimizer) else optimizer
