"""One run under ZeRO, from `setup` to `teardown`: build DeepSpeed's engines around a module, and restore the module."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, functional
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers, State
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.comm.coalescing import broadcast
from lightning_paral.compat.deepspeed.engine import share_masters
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.engines.zero.optimizer import Gradients, UsersOptimizer, check_optimizers
from lightning_paral.engines.zero.options import ZeROOptions, add_device_defaults, for_evaluation
from lightning_paral.engines.zero.partition import (
    ModuleSnapshot,
    ScalarsAsBytes,
    check_not_empty,
    count_trained,
    is_partitioned,
    is_stage3_parameter,
    make_contiguous,
    partition_parameters,
)
from lightning_paral.engines.zero.precision import ZeROPrecision
from lightning_paral.engines.zero.state import ZeroState
from lightning_paral.engines.zero.user_access import Steps, return_views
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.host_memory_check import host_memory_shortage
from lightning_paral.model.user_hooks import generate_together


def _staying_partitioned(module: Module) -> ExitStack:
    """Return a context in which no parameter of stage 3 is gathered by itself.

    To register a hook on each parameter, DeepSpeed 0.19.8 gathers it and partitions it again: each rank receives the
    whole module. torch's hooks need no values.
    """
    undo = ExitStack()
    for parameter in filter(is_stage3_parameter, module.parameters()):
        gather = partial(_gather_several, parameter.all_gather)  # type: ignore[attr-defined]
        undo.callback(replace_attributes(parameter, {"all_gather": gather}))
    return undo


def _gather_several(gather: Any, param_list: list[Any] | None = None, **options: Any) -> Any:
    return None if param_list is None else gather(param_list, **options)


def _linear(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what replaces torch's `plain` function at stage 3, where it would keep all gathered weights in memory.

    It makes autograd save `weight.t()`, a view. DeepSpeed's saves the parameter, which the backward pass gathers again.
    That has no forward mode, ignores subclasses and is wrong for complex numbers, so other weights get torch's.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    class Linear(LinearFunctionForZeroStage3):  # type: ignore[misc]
        @staticmethod
        def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return plain(x, weight.detach(), bias)  # of a parameter, autocast would keep the copy that it casts

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        tensors: tuple[Any, ...] = (input, weight, bias)
        for tensor in tensors:
            if is_partitioned(tensor):
                tensor._access.gather(tensor)
        is_sharded = is_stage3_parameter(weight) and not weight.is_complex()
        result: Tensor = (Linear.apply if is_sharded else plain)(*tensors)
        return result

    return linear


# What DeepSpeed can shard and train


def check_parameters(module: Module, *, trains: bool, config: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` for a parameter that DeepSpeed cannot shard or train, or would convert.

    Args:
        module: the module that is sharded.
        trains: whether an engine trains the parameters that require a gradient.
        config: DeepSpeed's configuration.
    """
    if config["zero_optimization"]["stage"] == 3:
        check_not_empty(module)
    partitioned = config["zero_optimization"]["stage"] == 3
    low = any(config.get(section, {}).get("enabled") for section in ("bf16", "fp16"))
    trainable = {torch.float16, torch.bfloat16} if low else {torch.float32}
    first = next(module.parameters(), None)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and trains:
            fits = parameter.dtype in trainable
        else:  # DeepSpeed 0.19.8 assumes that all parameters have the dtype of the first one
            matters = partitioned and (parameter.is_floating_point() or parameter is first)
            fits = not matters or parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if not fits:
            raise ConfigurationError(
                f"{name} has dtype {str(parameter.dtype).removeprefix('torch.')}, which ZeRO cannot train at this "
                f"precision, or shard at stage 3: it trains {'bfloat16 or float16' if low else 'float32'} only. Convert"
                " the parameter, set Trainer(precision=...) to its dtype, make it a buffer, or use paral_ddp."
            )


class StepsThroughEngine(Strategy):
    """A strategy that runs steps through the engine around the module, which turns off autocast around them."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step."""
        return self._run_step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step."""
        return self._run_step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test step."""
        return self._run_step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step."""
        return self._run_step("predict_step", args, kwargs)

    def _run_step(self, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        engine: Any = self.model

        def step() -> Any:
            with self.precision_plugin.forward_context():
                return getattr(self.lightning_module, name)(*args, **kwargs)

        if engine is self.lightning_module:
            return step()
        steps = engine.module
        steps.step = step
        try:
            with self.precision_plugin.forward_context():
                tensors = iter(engine())
            return tree_map_only(Tensor, lambda _: next(tensors), steps.outputs[0])
        finally:
            vars(steps).update(step=None, outputs=[])


class ZeroRun(ZeroState):
    """The state of a module during one run. `train` or `evaluate` builds engines around it; `restore` removes them.

    Args:
        strategy: the strategy, whose module has full or partitioned parameters.
        options: its options.
        config: DeepSpeed's configuration, without sizes that depend on the module.
        ended: the optimizers of past runs, with their states.
        deferred: computes the values of parameters that `configure_model` has built without them; `None` if there are
            none. They are computed, and partitioned at stage 3, at once.
    """

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        options: ZeROOptions,
        config: dict[str, Any],
        ended: EndedOptimizers,
        deferred: DeferredConstruction | None,
    ) -> None:
        assert strategy.lightning_module is not None
        assert isinstance(strategy.precision_plugin, ZeROPrecision)
        super().__init__(strategy.lightning_module, strategy.optimizers, strategy.root_device, ended)
        self._root = strategy.lightning_module
        self._options = options
        self._config = config
        self._precision = strategy.precision_plugin
        self._num_ranks = strategy.world_size
        self._ranks_per_node = strategy.num_processes
        if deferred is not None:
            check_not_empty(self.module)
            partition_parameters(self.module, deferred, dict(config))
        self._snapshot = ModuleSnapshot(self.module)
        self._engine: Any = None
        self._undo = ExitStack()

    # Setup

    def train(self, optimizers: Sequence[Any]) -> Any:
        """Build an engine, and return the module or engine that runs steps. *Collective* over the world.

        Args:
            optimizers: the optimizers that `configure_optimizers` returned. If it returned `None`, the module is
                prepared as for an evaluation.

        Raises:
            ConfigurationError: ZeRO does not support a parameter or the optimizer, or there are several.
        """
        options = self._options
        optimizer = check_optimizers(list(optimizers), self._root, trust=options.trust_optimizer)
        if optimizer is None:
            if "offload_parameters" in options.on_nvme:
                raise ConfigurationError(
                    "configure_optimizers returned None, and offload_parameters='nvme' stores trained parameters only. "
                    "Use offload_parameters='cpu'."
                )
            return self.evaluate()
        self.optimizers = [optimizer]
        on_cpu = self.device.type == "cpu" or options.offload_optimizer is not None
        self._users = users = UsersOptimizer(optimizer, self.module, self._ended.why_lost(optimizer), on_cpu=on_cpu)
        self._undo.callback(users.restore)
        if options.stage == 3:
            self._undo.callback(replace_attributes(functional, {"linear": _linear(functional.linear)}))
        with users.flat() as stepping:
            engine = self._build(stepping, self._sized_config())
            if engine.zero_offload_optimizer() is None:
                share_masters(engine.optimizer, options.stage)
        access = self.start_training(engine, users)
        self.gradients = Gradients(engine, users, access, self.module, self.trained)
        self._precision.start_fit(self.gradients)
        self._redirect_zero_grad(users)
        return engine

    def _build(self, optimizer: Optimizer | None, config: dict[str, Any]) -> Any:
        """Return an engine, which trains with `optimizer` if there is one. *Collective* over the world.

        At stage 3 it shards the parameters. It gets no learning-rate schedulers: Lightning steps them, and they
        change the user's optimizer.
        """
        import deepspeed

        module = self.module
        check_parameters(module, trains=optimizer is not None, config=config)
        if config["zero_optimization"]["stage"] == 3:
            partition_parameters(module, None, dict(self._config))
            generate_together(module, self._undo)
            for part in module.modules():
                part.register_forward_hook(return_views)  # before the hooks of DeepSpeed, which free parameters
        for parameter in module.parameters():
            make_contiguous(parameter)
        with ScalarsAsBytes(), _staying_partitioned(module):
            engine, _, _, _ = deepspeed.initialize(
                args=argparse.Namespace(device_rank=self.device.index),
                config=config,
                model=Steps(module),
                model_parameters=[each for each in module.parameters() if optimizer and each.requires_grad],
                optimizer=optimizer,
                dist_init_required=False,
            )
        self._engine = engine
        for change in (Module.train, Module.eval):  # DeepSpeed 0.19.8 sets `training` of the module only
            setattr(engine, change.__name__, MethodType(change, engine))
        engine.training = module.training
        return engine

    @property
    def trains(self) -> bool:
        """Whether the run trains: it is a fit with an optimizer."""
        return self.gradients is not None

    def evaluate(self) -> Any:
        """Prepare the module for forward passes only, and return the module or engine that runs them. *Collective*.

        At stage 3 this is an engine that gathers parameters, otherwise the module, which is moved to the device.
        """
        options = self._options
        forward: Any
        if options.stage == 3 and next(self.module.parameters(), None) is not None:
            forward = self._build(None, for_evaluation(self._sized_config()))
            self.start_evaluation()
        else:
            forward = self.module.to(self.device)
        if self._num_ranks > 1:
            full = [parameter for parameter in self.module.parameters() if not is_stage3_parameter(parameter)]
            broadcast([*full, *self.module.buffers()])
        return forward

    def begin_step(self) -> None:
        """Raise a `ConfigurationError` if a parameter was unfrozen or added or, at stage 3, written to."""
        if self.gradients is not None:
            self.gradients.check_fixed()
        if self._options.stage == 3:
            self.collect_writes()

    def _sized_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration for the module, with sizes that depend on its trained parameters."""
        options = self._options
        zero = add_device_defaults(
            self._config["zero_optimization"],
            options.stage,
            count_trained(self.module.parameters()),
            device_type=self.device.type,
            num_ranks=self._num_ranks,
        )
        if options.stage == 1 and not self._root.automatic_optimization:
            # With overlap, stage 1 reduces only in a backward pass that is known to be the last of its window.
            if self._config["zero_optimization"].get("overlap_comm"):
                raise ConfigurationError(
                    f"overlap_comm=True at stage 1 needs automatic optimization, but {type(self._root).__name__} "
                    "optimizes manually. Leave out overlap_comm, or set stage=2."
                )
            zero["overlap_comm"] = False
        torchs = all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in self.optimizers)
        # The step of torch's optimizers, which count steps by parameter, may run several times for each step.
        if self.device.type == "cpu" and options.offload_optimizer is None and torchs:
            zero = {"sub_group_size": zero["reduce_bucket_size"]} | zero  # bounds the temporary tensors of a step
        return {**self._config, "zero_optimization": zero}

    def _redirect_zero_grad(self, users: UsersOptimizer) -> None:
        """Make `zero_grad` of the module, its engine and its optimizer zero DeepSpeed's gradients."""
        assert self.gradients is not None
        for part in (users.optimizer, LightningModule.optimizers(self._root), self.module, self._engine):
            vars(part)["zero_grad"] = self.gradients.zero_grad
            self._undo.callback(vars(part).pop, "zero_grad", None)

    # Teardown

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the full module in host memory, and remove what DeepSpeed added; see `ShardedState.restore`.

        The module may have to stay partitioned, and can then be saved, but no run can use it.
        """
        self._precision.end_fit()
        try:
            try:
                if self.access is not None:
                    self.access.end(collect=not failed)
            except ConfigurationError as error:  # what user code wrote is lost, but not what was trained
                rank_zero_warn(f"At the end of the run: {error}")
            if self.gradients is not None:
                self.gradients.end()
            lost, state = self._read_optimizer_state()
            self._snapshot.restore(gather=self._may_gather(failed))
            if self._engine is not None:
                with nullcontext() if self._users is None else self._users.flat():
                    self._engine.destroy()
                # `__del__` (0.19.8) would call it again, when another engine may use the parameters.
                vars(self._engine)["destroy"] = lambda: None
            if self._users is not None:
                self._users.restore()
            if self._users is not None and self.gradients is not None:
                if lost is None:
                    ended.keep(self._users.optimizer, self.module, state, {})
                else:
                    ended.lose(self._users.optimizer, lost)
        finally:
            self._undo.close()

    def _read_optimizer_state(self) -> tuple[str | None, State | None]:
        """Return why the state is lost, or `None`; and the state with this rank's shards on the host."""
        lost = self._why_states_are_lost()
        if self._users is None or self.gradients is None or lost is not None:
            return lost, None
        try:
            return None, tree_map_only(FlatShard, _on_host, self.optimizer_state(self._users.optimizer))
        except Exception as error:  # do not prevent teardown: raise when user code reads the state
            return str(error), None

    def _why_states_are_lost(self) -> str | None:
        if "offload_optimizer" in self._options.on_nvme:
            return "it was on NVMe"
        if self._precision.is_low:
            return "it belongs to fp32 master copies of the weights, which were freed after the run"
        return None

    def _may_gather(self, failed: bool) -> bool:
        """Return whether the ranks can gather the full module, and warn if not. *Collective* unless `failed`."""
        name = type(self.module).__name__
        if failed:
            if any(is_partitioned(parameter) for parameter in self.module.parameters()):
                rank_zero_warn(
                    f"{name} stays partitioned, because the run failed: its parameters are empty on every rank, even "
                    "in state_dict() and in copies. Load a checkpoint into a new module."
                )
            return False
        if self._snapshot.was_full:
            return True
        obstacle = host_memory_shortage(self._snapshot.num_bytes, self._ranks_per_node)
        if obstacle is not None:
            rank_zero_warn(
                f"{name} stays partitioned: {obstacle}. If its weights are not saved, call "
                f"trainer.save_checkpoint(path, weights_only=True): no further run can use this {name}."
            )
        return obstacle is None


def _on_host(shard: FlatShard) -> FlatShard:
    """Return `shard` with values that need no engine. On the host they are DeepSpeed's own, without a copy."""
    values = shard.read().to("cpu")
    return FlatShard(shard.shape, shard.dtype, shard.start, values.numel(), partial(identity, values))
