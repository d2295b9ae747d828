"""Distributed data parallel: a replica per rank, gradients averaged by an all-reduce of your choice."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, Unpack, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_paral.averaging.buffers import share_when_swapped
from lightning_paral.comm import ALL_REDUCE, AllReduce, WireDtype
from lightning_paral.comm.ddp_hook import BucketReducer
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.compat.lightning.strategies import (
    ddp_options,
    forget_static_graph,
    layer_sync_of,
    set_ddp_options,
)
from lightning_paral.compat.torch.ddp_broadcast import broadcast_any_dtype
from lightning_paral.compat.torch.ddp_reducer import remove_reducer
from lightning_paral.engines.ddp.options import DDPOptions, check_choice, check_hook, check_options, explain_unused
from lightning_paral.engines.ddp.reducer import ReducedParameters
from lightning_paral.errors import UnusedParametersError
from lightning_paral.model.batchnorm import check_sync_batchnorm
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.foreign_parameters import check_averaged
from lightning_paral.option_types import check_at_least
from lightning_paral.options import pop_rank_options, takes_rank_options
from lightning_paral.strategies.base import ParalStrategy

AllReduceName = Literal["auto", "ring", "native", "reduce_broadcast", "all_to_all"]

_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"


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
        check_choice("all_reduce", all_reduce, get_args(AllReduceName))
        check_choice("wire_dtype", wire_dtype, (None, *WIRE_DTYPES))
        check_hook(ddp_comm_hook, all_reduce, wire_dtype)
        lightnings = self._take_rank_options(pop_rank_options(ddp_options))
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
            process_group_backend=lightnings["process_group_backend"],
            timeout=lightnings["timeout"],
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **ddp_options,  # type: ignore[misc, arg-type]  # without `RankOptions`
        )
        self._comm_state, self._comm_hook, self._comm_wrapper = ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper
        self._all_reduce = all_reduce
        if all_reduce == "ring":
            self.strategy_name = "paral_ddp_ring"
        self._wire_dtype = WIRE_DTYPES[wire_dtype] if wire_dtype else None
        self._reducer: BucketReducer | None = None
        self._static_graph_learnt = False
        self._reduced: ReducedParameters | None = None
        self._undo = ExitStack()

    # Process group: `ParalStrategy`.

    # Model wrapping

    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device and wrap it. *Collective* over the world."""
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            check_sync_batchnorm(self.lightning_module, layer_sync_of(self), self.root_device)
            self.checkpoint_activations()
        assert self.lightning_module is not None
        self._undo.callback(broadcast_any_dtype(self.lightning_module))
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers; let DDP find unused parameters if several take turns. *Collective* over the world.

        Raises:
            ConfigurationError: an optimizer holds tensors whose gradients no rank averages.
        """
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if self.dims.data_size > 1:
            check_averaged(self.optimizers, self.lightning_module)
        takes_turns = not self.lightning_module.automatic_optimization and len(self.optimizers) > 1
        options = ddp_options(self)
        if takes_turns and not {"find_unused_parameters", "static_graph"} & options.keys():
            # Each backward pass reaches only some of the parameters, such as the generator's.
            self._undo.callback(set_ddp_options, self, options)
            set_ddp_options(self, options | {"find_unused_parameters": True})
            self._make_reducer_anew()

    def configure_ddp(self) -> None:
        """Wrap the module, and watch for what changes in it during the fit. *Collective* over the world."""
        assert self.lightning_module is not None
        check_embeddings(self.lightning_module, self.dims.data_size)
        self._wrap()
        assert isinstance(self.model, DistributedDataParallel)
        self._reduced = ReducedParameters(self.lightning_module, self.timeout, self._undo)
        # Buffers with a hook of the user's own are the hook's.
        shares = self.model.broadcast_buffers and not hasattr(self.model, "buffer_hook")
        self._buffers = RankZeroBuffers(self.lightning_module, shares, self.dims)
        if shares:
            self._undo.callback(share_when_swapped())

    def _wrap(self) -> None:
        """Wrap the module in DDP, and set up the requested reduction of gradients."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._static_graph_learnt = False
        hook, wrapper = self._comm_hook, self._comm_wrapper
        if hook is not None and self.root_device.type != "cuda":
            # Lightning registers hooks on CUDA only; DDP accepts them on every backend.
            self.model.register_comm_hook(self._comm_state, hook if wrapper is None else wrapper(hook))
        all_reduce = self._choose_all_reduce()
        if all_reduce is not None and self._reducer is None:
            self._reducer = BucketReducer(all_reduce, self.model.process_group, self.root_device, self._wire_dtype)
        if self._reducer is not None:
            self._reducer.register(self.model)

    def _choose_all_reduce(self) -> AllReduce | None:
        """Return the function that averages gradients, or `None` to leave them to DDP's own reducer."""
        name = self._all_reduce
        if name == "auto":
            name = "ring" if self._wire_dtype is not None and self.root_device.type == "cpu" else "native"
        if name == "native" and self._wire_dtype is None:
            return None
        return ALL_REDUCE[name]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the reducer anew where other parameters are trained than those it has: some were frozen or unfrozen.

        *Collective* in the first step of an epoch, and where it is made anew.

        Raises:
            ConfigurationError: not all ranks train the same parameters.
            UnusedParametersError: parameters had no part in the loss of the step before; names them.
        """
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        if self._reduced is None:
            return
        keep_frozen = not self.lightning_module.automatic_optimization or self.model.find_unused_parameters  # type: ignore[union-attr]
        if self._reduced.need_another_reducer(self.lightning_module.current_epoch, batch_idx, bool(keep_frozen)):
            self._make_reducer_anew()

    def _make_reducer_anew(self) -> None:
        old, options = self.model, ddp_options(self)
        assert isinstance(old, DistributedDataParallel)
        assert self._reduced is not None
        assert self.lightning_module is not None
        with self._unused_explained():
            remove_reducer(old)
        # What ranks hold is the same already, or differs on purpose, between the averagings of post-local SGD.
        set_ddp_options(self, options | {"init_sync": False})
        self.model = self.lightning_module
        try:
            with self._reduced.for_next_reducer():
                self._wrap()
        finally:
            set_ddp_options(self, options)
        assert isinstance(self.model, DistributedDataParallel)
        self.model.require_forward_param_sync = old.require_forward_param_sync
        forget_static_graph(self)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients locally in backward passes inside this context."""
        # A static graph is learnt from the first backward pass, in which torch's reducer asserts that it may reduce
        # (torch 2.13). Reducing once too often changes no sum: the average of an average is itself.
        if ddp_options(self).get("static_graph") and not self._static_graph_learnt:
            yield
            self._static_graph_learnt = True
        else:
            with super().block_backward_sync():
                yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step in the replica.

        Raises:
            UnusedParametersError: parameters had no part in the loss of the step before; names them.
        """
        assert self.lightning_module is not None
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            # Lightning's redirection leaves DDP as after a step without reduction: it would never broadcast again.
            self.model.require_forward_param_sync = True
        with self._unused_explained(), nullcontext() if self._reduced is None else self._reduced.step():
            return super().training_step(*args, **kwargs)

    @contextmanager
    def _unused_explained(self) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:
            if _UNUSED_PARAMETERS not in str(error):
                raise
            assert self._reduced is not None
            raise UnusedParametersError(explain_unused(str(error), self._reduced.names, self.global_rank)) from error

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are averaged. *Collective* over the world.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step, too late for that.
        """
        if self._reduced is not None:
            self._reduced.before_backward(closure_loss)
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the step of an optimizer, with gradients that are the same on all ranks.

        Raises:
            ConfigurationError: some came by `loss.backward()`, and were not averaged.
        """
        if isinstance(optimizer, LBFGS):
            closure = self._averaging(closure)
        with nullcontext() if self._reduced is None else self._reduced.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` with the mean of all ranks' losses: LBFGS decides by it how far to go, and when to stop."""

        def averaged() -> Any:
            loss = closure()
            return self.reduce(loss.detach().clone()) if isinstance(loss, Tensor) else loss

        return averaged

    def on_validation_start(self) -> None:
        """Evaluate rank 0's buffers on all ranks. *Collective* over the world during a fit."""
        super().on_validation_start()
        if isinstance(self.model, DistributedDataParallel):
            # Shared already. A rank without a batch would not take part in DDP's own broadcast, in the first step.
            self.model.require_forward_param_sync = False

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. One ordinary Lightning file, of which each rank writes an equal part.

    def teardown(self) -> None:
        """Unwrap the model, and stop reducing."""
        self._undo.close()
        self._reduced = None
        super().teardown()
        if self._reducer is not None:
            self._reducer.shutdown()
            self._reducer = None
