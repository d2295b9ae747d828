"""Distributed data parallel: a replica on each rank; a choice of all-reduce algorithms averages the gradients."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.engines.ddp.options import DDPOptions
from lightning_paral.engines.ddp.run import DDPRun, averaged_closure
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.checks import check_embeddings, check_optimizer_parameters, check_sync_batchnorm
from lightning_paral.option_types import takes
from lightning_paral.strategies.base import ParalStrategy

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


class ParalDDPStrategy(ParalStrategy, DDPStrategy):
    """Run one process per device, each with the full model, and average gradients during the backward pass.

    Select it by name, `Trainer(strategy="paral_ddp")`, or pass an object to set options,
    `Trainer(strategy=ParalDDPStrategy(all_reduce="ring", wire_dtype="bf16"))`. Follows Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: `all_reduce`, `wire_dtype` or an option is unknown, or `all_reduce` or `wire_dtype` is
            given together with a hook.
    """

    strategy_name = "paral_ddp"

    _options: DDPOptions

    @takes(DDPOptions)
    def __init__(self, options: DDPOptions) -> None:
        super().__init__(
            options,
            ddp_comm_state=options.ddp_comm_state,
            ddp_comm_hook=options.ddp_comm_hook,
            ddp_comm_wrapper=options.ddp_comm_wrapper,
            **options.for_torch,
        )
        self.shares_buffers = options.broadcast_buffers is not False
        self.strategy_name = options.strategy_name
        self._ddp: DDPRun | None = None  # set during a fit

    # Process group: `ParalStrategy`.

    # Model wrapping

    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device; in a fit, wrap it and create its optimizers. *Collective* over the world.

        Raises:
            ConfigurationError: the module cannot be trained in replicas, or an optimizer has tensors whose gradients
                would not be averaged.
        """
        assert self.lightning_module is not None
        if self._is_fit:
            check_sync_batchnorm(self.lightning_module, layer_sync_of(self), self.root_device)
        _check_dtypes(self.lightning_module, "gloo" if self.root_device.type == "cpu" else "NCCL")
        super().setup(trainer)  # calls `configure_ddp`, then `setup_optimizers`

    def configure_ddp(self) -> None:
        """Wrap the module in `DistributedDataParallel`. *Collective* over the world."""
        assert self.lightning_module is not None
        check_embeddings(self.lightning_module, self.dims.data_size)
        self._ddp = DDPRun(self, self._options, self.dims, self._at_end)
        self._fit_buffers()

    def make_buffers(self) -> RankZeroBuffers:
        """Return the object that broadcasts buffers for validation; in training steps, DDP broadcasts them itself."""
        assert self.lightning_module is not None
        shares_buffers = self._ddp is None or self._ddp.shares_buffers
        return RankZeroBuffers(self.lightning_module, shares_buffers, self.dims, in_training=False)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers; make DDP find unused parameters if several take turns. *Collective* over the world.

        Raises:
            ConfigurationError: an optimizer has tensors whose gradients would not be averaged.
        """
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if self.dims.data_size > 1:
            check_optimizer_parameters(self.optimizers, self.lightning_module)
        if self._ddp is not None:
            self._ddp.add_optimizers(self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank in backward passes inside this context."""
        blocked = super().block_backward_sync()
        with blocked if self._ddp is None else self._ddp.accumulating(blocked):
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Replace the reducer if parameters were frozen or unfrozen.

        *Collective* in the first step of an epoch, and when the reducer is replaced.

        Raises:
            ConfigurationError: the ranks train different parameters.
            UnusedParametersError: some parameters did not contribute to the loss of the previous step.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._ddp is not None:
            self._ddp.before_batch(batch_idx, self.timeout)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step.

        Raises:
            UnusedParametersError: some parameters did not contribute to the loss of the previous step.
        """
        step = super().training_step
        return step(*args, **kwargs) if self._ddp is None else self._ddp.training_step(step, args, kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are averaged. *Collective* over the world.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step, which is too late.
        """
        if self._ddp is not None:  # otherwise a test or validation step calls `manual_backward`
            self._ddp.before_backward(closure_loss)
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step with averaged gradients.

        Raises:
            ConfigurationError: gradients were computed by `loss.backward()`, which does not average them.
        """
        closure = averaged_closure(optimizer, closure, self.reduce)
        with nullcontext() if self._ddp is None else self._ddp.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world during a fit."""
        super().on_validation_start()
        if self._ddp is not None:
            self._ddp.before_validation()

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. By default, one ordinary Lightning file; each rank writes an equal part of it.

    def teardown(self) -> None:
        """Unwrap the module, and release the threads and streams that reduced its gradients."""
        self._ddp = None
        super().teardown()


def _check_dtypes(module: Module, backend: str) -> None:
    """Raise a `ConfigurationError` for a dtype that `backend` cannot broadcast: most integers, and float8 over gloo."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        is_known = tensor.is_complex() or tensor.is_floating_point() or tensor.dtype in _INTEGERS
        if not is_known or (is_float8 and backend == "gloo"):
            raise ConfigurationError(
                f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, which {backend} cannot broadcast to all "
                "ranks. Convert it, register it as bytes, tensor.view(torch.uint8), or train with paral_fsdp."
            )
