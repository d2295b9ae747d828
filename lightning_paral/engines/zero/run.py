"""One run under ZeRO, from `setup` to `teardown`: build DeepSpeed's engines around a module, and restore the module."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.ended_optimizers import EndedOptimizers
from lightning_paral.comm.broadcast import broadcast
from lightning_paral.engines.zero.engine.build import (
    build_engines,
    build_inference_engine,
    build_training_engine,
    destroy,
    drop_untrained_gradients,
    trained_parameters,
)
from lightning_paral.engines.zero.engine.checks import check_parameters, check_several
from lightning_paral.engines.zero.engine.construction import warn_about_full_parameters
from lightning_paral.engines.zero.engine.hooks import RootHooksOnce, forward_hook_keys, new_forward_hook_keys
from lightning_paral.engines.zero.parameters.partition import count_trained, is_partitioned, is_stage3_parameter
from lightning_paral.engines.zero.parameters.requires_grad import FixedParameters
from lightning_paral.engines.zero.parameters.saved_weights import SavedWeights
from lightning_paral.engines.zero.parameters.snapshot import ModuleSnapshot
from lightning_paral.engines.zero.run_settings import RunSettings
from lightning_paral.engines.zero.runtime.config import add_device_defaults
from lightning_paral.engines.zero.runtime.nvme import check_buffers, check_space, load_async_io
from lightning_paral.engines.zero.state.engine_shards import EngineShards
from lightning_paral.engines.zero.state.zero_state import ZeroState
from lightning_paral.engines.zero.training.gradients import PartitionedGradients
from lightning_paral.engines.zero.training.joint_gradients import join_gradients
from lightning_paral.engines.zero.training.step_in_pieces import can_step_in_pieces
from lightning_paral.engines.zero.training.users_optimizer import (
    UsersOptimizer,
    check_optimizers,
    make_engine_optimizer,
)
from lightning_paral.model.buffers import buffers_to_broadcast
from lightning_paral.model.host_memory_check import host_memory_shortage
from lightning_paral.model.hugging_face import generate_together


class ZeroRun(ZeroState):
    """The state of a module during one run. `train` or `evaluate` builds engines around it; `restore` removes them.

    Args:
        module: the LightningModule. Its parameters are full or partitioned.
        optimizers: the optimizers of the last fit.
        device: the device of this rank.
        ended: the optimizers of past runs, with their states.
        settings: the settings of this run.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        ended: EndedOptimizers,
        settings: RunSettings,
    ) -> None:
        super().__init__(module, optimizers, device, ended)
        self._root = module
        self._settings = settings
        self._snapshot = ModuleSnapshot(module)
        self._root_hooks = forward_hook_keys(module)
        self._built: list[Any] = []
        self._users: list[UsersOptimizer] = []
        self._fixed: FixedParameters | None = None
        self._saved_weights: SavedWeights | None = None
        self._undo = ExitStack()

    # Setup

    def check_size(self) -> None:
        """Warn about parameters that every rank built in full at stage 3, and check disk and buffers for NVMe.

        Raises:
            ConfigurationError: a disk has too little free space, or a buffer is too small for a parameter.
        """
        options, dims = self._settings.options, self._settings.dims
        if options.stage == 3:
            warn_about_full_parameters(self.module)
        num_elements = count_trained(self.module.parameters())
        check_space(options, num_elements * self._settings.ranks_per_node // dims.shard)
        threshold = self._settings.config["zero_optimization"].get("stage3_param_persistence_threshold", 100_000)
        check_buffers(options, self.module, dims.shard, threshold)

    def train(self, optimizers: Sequence[Any]) -> Any:
        """Build an engine for each optimizer, and return the module or engine that runs steps. *Collective*.

        Args:
            optimizers: the optimizers that `configure_optimizers` returned. If it returned `None`, the module is
                prepared as for an evaluation.

        Raises:
            ConfigurationError: ZeRO does not support a parameter, an optimizer, or this combination of optimizers.
        """
        found = check_optimizers(list(optimizers), self._root)
        if found is None:
            return self.evaluate()
        self.optimizers = found
        self._users = [UsersOptimizer(optimizer, self.module) for optimizer in found]
        self._begin_stage3()
        forward, engines = self._build_engines()
        self._built = [forward, *engines]
        shards = [EngineShards(engine, self.module, users) for engine, users in zip(engines, self._users, strict=True)]
        writes = self.start_training(shards)
        gradients = []
        for engine, users, engine_shards in zip(engines, self._users, shards, strict=True):
            usage = engine_shards.watch_usage(find_unused=self._settings.options.find_unused_parameters)
            gradients.append(PartitionedGradients(engine, users, writes, usage))
        self.gradients = self._settings.precision.start_fit(join_gradients(gradients, found))
        self._redirect_users_calls(gradients)
        self._fixed = FixedParameters(self.module, self._undo)
        if self._settings.options.stage == 3:
            engine_of = {
                id(parameter): engine
                for engine, users in zip(engines, self._users, strict=True)
                for group in users.groups
                for parameter in group["params"]
            }

            def num_steps(parameter: Parameter) -> int:
                engine = engine_of.get(id(parameter))
                return 0 if engine is None else int(engine.global_steps)

            self._saved_weights = SavedWeights(self.module, num_steps, self._undo)
        return forward

    def _begin_stage3(self) -> None:
        if self._settings.options.stage == 3:
            generate_together(self.module, self._undo)

    def saving_views(self) -> AbstractContextManager[None]:
        """Return a context in which autograd does not keep gathered parameters in memory; see `SavedWeights`."""
        return nullcontext() if self._saved_weights is None else self._saved_weights.saving_views()

    @property
    def trains(self) -> bool:
        """Whether the run trains: it is a fit with an optimizer."""
        return self.gradients is not None

    def evaluate(self) -> Any:
        """Prepare the module for forward passes only, and return the module or engine that runs them. *Collective*.

        At stage 3 this is an engine that gathers parameters, otherwise the module, which is moved to the device.
        """
        options = self._settings.options
        forward: Any
        if options.stage == 3 and next(self.module.parameters(), None) is not None:
            load_async_io(options)
            self._begin_stage3()
            forward = build_inference_engine(self.module, self._sized_config(self.module), self.device)
            self._built = [forward]
            self.start_evaluation()
        else:
            forward = self.module.to(self.device)
        if self._settings.dims.data_size > 1:
            full = [parameter for parameter in self.module.parameters() if not is_stage3_parameter(parameter)]
            broadcast([*full, *buffers_to_broadcast(self.module)])
        return forward

    def redirection(self) -> RootHooksOnce:
        """Return the forward redirection that runs steps through the engine and its hooks on the root module."""
        return RootHooksOnce(new_forward_hook_keys(self.module, self._root_hooks))

    def check_fixed(self) -> None:
        """Check that no parameter was unfrozen or added after setup.

        Raises:
            ConfigurationError: some parameters were. The message names them.
        """
        if self._fixed is not None:
            self._fixed.check()

    def _build_engines(self) -> tuple[Any, list[Any]]:
        """Build the engines. Return the module or engine that runs steps, and the engine of each optimizer."""
        options, module = self._settings.options, self.module
        offload, trust = options.offload_optimizer is not None, options.trust_optimizer
        if len(self._users) > 1:
            check_several(self._users, options, self._settings.precision.precision)
            for handle in drop_untrained_gradients(module, self._users):
                self._undo.callback(handle.remove)
            return build_engines(module, self._users, self._sized_config, self.device, offload=offload, trust=trust)
        config = self._sized_config(module)
        check_parameters(module, trained_parameters(module), config)
        optimizer = make_engine_optimizer(self._users[0], offload=offload, trust=trust)
        load_async_io(options)
        engine = build_training_engine(module, optimizer, config, self.device)
        return engine, [engine]

    def _sized_config(self, module: Module) -> dict[str, Any]:
        """Return DeepSpeed's configuration for `module`, with sizes that depend on its trained parameters."""
        zero = add_device_defaults(
            self._settings.config["zero_optimization"],
            self._settings.options.stage,
            count_trained(module.parameters()),
            device_type=self.device.type,
            num_ranks=self._settings.dims.shard,
        )
        if self._steps_on_subgroups():
            zero = {"sub_group_size": zero["reduce_bucket_size"]} | zero
        return {**self._settings.config, "zero_optimization": zero}

    def _steps_on_subgroups(self) -> bool:
        """Return whether stage 3 shall step sub-group by sub-group, each of which gets a copy of its gradients."""
        options = self._settings.options
        in_memory = options.stage == 3 and self.device.type == "cpu" and options.offload_optimizer is None
        return in_memory and all(can_step_in_pieces(optimizer) for optimizer in self.optimizers)

    def _redirect_users_calls(self, gradients: Sequence[PartitionedGradients]) -> None:
        """Make `zero_grad` of the module and its optimizers drop DeepSpeed's gradients, and hide optimizer states."""
        assert self.gradients is not None
        found: Any = LightningModule.optimizers(self._root)
        wrappers = found if isinstance(found, list) else [found]
        for users, wrapper, users_gradients in zip(self._users, wrappers, gradients, strict=True):
            users.hide_state(users_gradients.zero_grad, users_gradients.engine.optimizer.optimizer.state)
            vars(wrapper)["zero_grad"] = users_gradients.zero_grad  # the wrapper would inherit torch's
            self._undo.callback(vars(wrapper).pop, "zero_grad", None)
        vars(self.module)["zero_grad"] = self.gradients.zero_grad
        self._undo.callback(vars(self.module).pop, "zero_grad", None)

    # Teardown

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the full module in host memory, and remove what DeepSpeed added; see `ShardedState.restore`.

        If the module must stay partitioned, the next run under ZeRO can use it as it is.
        """
        self._settings.precision.end_fit()
        try:
            if self.writes is not None:
                self.writes.end(collect=not failed)
            for users in self._users:
                users.show_state()
            if self.gradients is not None:
                self._keep_optimizer_states(ended)
                self.gradients.end()
            self._snapshot.restore(gather=self._may_gather(failed))
            for engine in {id(built): built for built in self._built if hasattr(built, "destroy")}.values():
                destroy(engine)
        finally:
            self._undo.close()

    def _keep_optimizer_states(self, ended: EndedOptimizers) -> None:
        lost = self._why_states_are_lost()
        for optimizer in self.optimizers:
            if lost is not None:
                ended.lose(optimizer, lost)
                continue
            try:
                ended.keep(optimizer, self.module, self.optimizer_state(optimizer), {})
            except Exception as error:  # do not prevent teardown: raise when user code reads the state
                ended.lose(optimizer, str(error))

    def _why_states_are_lost(self) -> str | None:
        if "offload_optimizer" in self._settings.options.on_nvme:
            return "it was on NVMe"
        if self._settings.precision.is_low:
            return "it belongs to fp32 master copies of the weights, which were freed after the run"
        return None

    def _may_gather(self, failed: bool) -> bool:
        """Return whether the ranks can gather the full module, and warn if not. *Collective* unless `failed`."""
        name = type(self.module).__name__
        if failed:
            if any(is_partitioned(parameter) for parameter in self.module.parameters()):
                rank_zero_warn(
                    f"{name} stays partitioned, because the run failed: its parameters are empty on every rank, even "
                    "in state_dict() and in copies. Load a checkpoint into a new module, or fit this one again under "
                    "ZeRO stage 3, which can use it as it is."
                )
            return False
        if self._snapshot.was_full:
            return True
        obstacle: str | None = "its weights are on NVMe"
        if not self._snapshot.is_on_nvme:
            obstacle = host_memory_shortage(self._snapshot.num_bytes, self._settings.ranks_per_node)
        if obstacle is not None:
            rank_zero_warn(f"{name} stays partitioned: {obstacle}.")
        return obstacle is None
