"""Distributed data parallel: a replica per rank, gradients averaged by an all-reduce of your choice."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, Unpack

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.comm import WireDtype
from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.compat.torch.ddp_broadcast import broadcast_any_dtype
from lightning_paral.engines.ddp.gradient_reduction import AllReduceName, GradientReduction
from lightning_paral.engines.ddp.options import DDPOptions, check_choice, check_options
from lightning_paral.engines.ddp.run import DDPRun, averaged_closure
from lightning_paral.model.batchnorm import check_sync_batchnorm
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.foreign_parameters import check_averaged
from lightning_paral.option_types import check_at_least
from lightning_paral.options import takes_rank_options
from lightning_paral.strategies.base import ParalStrategy


class ParalDDPStrategy(ParalStrategy, DDPStrategy):
    """One process per device, each with the whole model; gradients are averaged while the backward pass still runs.

    Selected by name, `Trainer(strategy="paral_ddp")`, or as an object where options are wanted,
    `Trainer(strategy=ParalDDPStrategy(all_reduce="ring", wire_dtype="bf16"))`. Follows Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.

    Args:
        all_reduce: how gradients are averaged. `"native"` is the backend's own; `"ring"`, `"reduce_broadcast"` and
            `"all_to_all"` are those of `lightning_paral.comm`, on any backend. `"auto"` takes the backend's own, which
            was as fast as our ring or faster wherever both were measured (docs/measurements.md), except on gloo with a
            `wire_dtype`: there the ring is faster, for gloo's own cannot add in fp32 what it carries narrower.
        wire_dtype: gradients cross the wire as `"bf16"` or `"fp16"` and are added in their own dtype (fp32); halves the
            traffic of fp32 gradients, but not that of NCCL between nodes of more than four GPUs each: the sum in fp32
            needs an all-to-all, which crosses between nodes more often than NCCL's rings. `None`: in their own dtype.
        gradient_as_bucket_view: let `.grad` be a view into the communication bucket, which saves a copy of all
            gradients. Code that gives gradients other memory (`p.grad.data = ...`) then trains wrongly: torch's reducer
            does not notice.
        start_method: `"popen"` runs the script again for each further local rank; `"spawn"`, `"fork"`, `"forkserver"`.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: a communication hook of your own, as in Lightning's
            `DDPStrategy` but honoured on CPU, too. Excludes `all_reduce` and `wire_dtype`.
        model_averaging_period: as in Lightning's `DDPStrategy`, for post-local SGD.
        ddp_options: options of every strategy (see `RankOptions`), and every other option of
            `torch.nn.parallel.DistributedDataParallel`, such as `bucket_cap_mb`, `static_graph` and
            `find_unused_parameters`.

    Raises:
        ConfigurationError: an unknown `all_reduce`, `wire_dtype` or option, or two ways to reduce gradients at once.
    """

    strategy_name = "paral_ddp"

    @takes_rank_options
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        all_reduce: AllReduceName = "auto",
        wire_dtype: WireDtype | None = None,
        gradient_as_bucket_view: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        **ddp_options: Unpack[DDPOptions],
    ) -> None:
        self._reduction = GradientReduction(
            all_reduce, wire_dtype, hook=ddp_comm_hook, state=ddp_comm_state, wrapper=ddp_comm_wrapper
        )
        check_options(ddp_options)
        check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        check_at_least("ParalDDPStrategy", "model_averaging_period", model_averaging_period, 1)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **ddp_options,
        )
        self.strategy_name = "paral_ddp_ring" if all_reduce == "ring" else "paral_ddp"
        # Of one run:
        self._ddp: DDPRun | None = None
        self._undo = ExitStack()

    # Process group: `ParalStrategy`.

    # Model wrapping

    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device; for a fit, wrap it and create its optimizers. *Collective* over the world.

        Raises:
            ConfigurationError: the module cannot be trained in replicas, or an optimizer holds tensors whose gradients
                no rank averages.
        """
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            check_sync_batchnorm(self.lightning_module, layer_sync_of(self), self.root_device)
            self.checkpoint_activations()
        self._undo.callback(broadcast_any_dtype(self.lightning_module))
        super().setup(trainer)  # which calls `configure_ddp`, then `setup_optimizers`

    def configure_ddp(self) -> None:
        """Wrap the module in `DistributedDataParallel`. *Collective* over the world."""
        assert self.lightning_module is not None
        check_embeddings(self.lightning_module, self.dims.data_size)
        self._ddp = DDPRun(self, self._reduction, super().configure_ddp, self.dims, self.timeout, self._undo)
        self._buffers_of_fit()

    def make_buffers(self) -> RankZeroBuffers:
        """Return the object that broadcasts the buffers for validation; in training steps, DDP broadcasts them."""
        assert self.lightning_module is not None
        assert self._ddp is not None
        return RankZeroBuffers(self.lightning_module, self._ddp.shares_buffers, self.dims, in_training=False)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers; let DDP find unused parameters if several take turns. *Collective* over the world.

        Raises:
            ConfigurationError: an optimizer holds tensors whose gradients no rank averages.
        """
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if self.dims.data_size > 1:
            check_averaged(self.optimizers, self.lightning_module)
        if self._ddp is not None:
            self._ddp.add_optimizers(self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank in backward passes inside this context."""
        blocked = super().block_backward_sync()
        with blocked if self._ddp is None else self._ddp.accumulating(blocked):
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Replace the reducer if parameters were frozen or unfrozen. *Collective* then, and at the start of an epoch.

        Raises:
            ConfigurationError: not all ranks train the same parameters.
            UnusedParametersError: parameters had no part in the loss of the step before; names them.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._ddp is not None:
            self._ddp.before_batch(batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step of the replica.

        Raises:
            UnusedParametersError: parameters had no part in the loss of the step before; names them.
        """
        with nullcontext() if self._ddp is None else self._ddp.training_step():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are averaged. *Collective* over the world.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step, too late for that.
        """
        if self._ddp is not None:
            self._ddp.before_backward(closure_loss)
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the step of an optimizer, with gradients that are the same on all ranks.

        Raises:
            ConfigurationError: some came by `loss.backward()`, and were not averaged.
        """
        closure = averaged_closure(optimizer, closure, self.reduce)
        with nullcontext() if self._ddp is None else self._ddp.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_validation_start(self) -> None:
        """Evaluate rank 0's buffers on all ranks. *Collective* over the world during a fit."""
        super().on_validation_start()
        if self._ddp is not None:
            self._ddp.before_validation()

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. One ordinary Lightning file, of which each rank writes an equal part.

    def teardown(self) -> None:
        """Unwrap the module, and stop reducing its gradients."""
        self._undo.close()
        self._ddp = None
        super().teardown()
        self._reduction.shutdown()
