"""Plan how the layers of a module are split over the tensor ranks, split them, and check the first step."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from lightning_paral.compat.torch.modules import is_compiled
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup, broadcast_from_first_rank, check_same_batch, every_rank
from lightning_paral.distributed.mesh import TENSOR, ParallelDims
from lightning_paral.distributed.rng_state import current_states, restore_states
from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.run import FSDPRun
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.tensor.check import Step, check_split
from lightning_paral.engines.tensor.layers import TensorSplit
from lightning_paral.engines.tensor.plan import TensorPlan, make_plan
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.host_memory_check import host_memory_shortage

_STEPS = ("training", "validation", "test", "predict")


class TensorParallel:
    """Splits the layers of a module over the tensor ranks, for one run.

    Args:
        module: the LightningModule, not yet sharded.
        options: the options of the strategy.
        dims: the arrangement of the ranks.
        mesh: the device mesh of all ranks.
        trainer: the Trainer.
        ranks_per_node: the number of ranks that share the memory of a node.
        elsewhere: modules that other stages of a pipeline have. Their layers are not split on this rank.

    Raises:
        ConfigurationError: the plan cannot be carried out, or a part of the module is compiled.
    """

    def __init__(
        self,
        module: LightningModule,
        options: FSDPOptions | PipelineOptions,
        dims: ParallelDims,
        mesh: DeviceMesh,
        trainer: Trainer,
        ranks_per_node: int,
        elsewhere: Collection[Module] = (),
    ) -> None:
        if ranks_per_node % dims.tensor:
            rank_zero_warn(
                f"tensor_parallel={dims.tensor}, but a node has {ranks_per_node} rank(s): tensor ranks are on "
                "different nodes, and send activations over the network in each layer. Choose a number that divides "
                "the ranks of a node, or 'node'."
            )
        splits_positions = isinstance(options, FSDPOptions) and options.sequence_parallel
        _check_not_compiled(module)
        self._module = module
        # Each rank of a pipeline compares the gradients of its own samples.
        self._averaged = dims if isinstance(options, FSDPOptions) else ParallelDims()
        self._mesh = mesh[TENSOR]
        self._ranks_per_node = ranks_per_node
        self._awaits_batch = True
        self._checked = set() if options.check_plan else {f"{each}_step" for each in _STEPS}
        if not module.automatic_optimization:
            self._checked.add("training_step")
        self._logged: list[Any] = []
        plan = make_plan(module, dims.tensor, options.plan)
        self._device = trainer.strategy.root_device
        rank_zero_info(_summary(plan, dims.tensor))
        own = {name: split for name, split in plan.splits.items() if module.get_submodule(name) not in elsewhere}
        plan = replace(plan, splits=own)
        self.split = TensorSplit(module, plan, self._mesh, splits_positions=splits_positions)
        self.share_random_states()

    def before_step(self, engine: FSDPRun, context: Callable[[], Any], args: tuple[Any, ...]) -> None:
        """Prepare for a training step; check the first one. *Collective* over the world in the first step of a fit.

        Args:
            engine: the run of FSDP.
            context: returns the context manager in which steps run.
            args: the arguments of `training_step`.

        Raises:
            ConfigurationError: splitting the layers changes the loss or a gradient.
        """
        self.begin_step(args[0])
        if "training_step" in self._checked:
            return

        def step(batch: Any) -> Tensor | None:
            def run(*args: Any) -> Any:
                with context():
                    return self._module.training_step(*args)

            with engine.accumulating(False):
                output = engine.training_step(run, (batch, *args[1:]), {})
                loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
                if loss is not None:
                    engine.explained(_backward, loss)
            return loss

        self.check(args[0], step)

    def begin_step(self, batch: Any) -> None:
        """Prepare for a training step. *Collective* over the tensor ranks in the first one, or if there is dropout."""
        self.split.begin_step()
        if self._awaits_batch:
            check_same_batch("training_step", batch, "The tensor ranks", self._mesh.get_group())
            self._awaits_batch = False
        if self.split.may_draw:
            self.share_random_states()

    def before_evaluation(self, engine: FSDPRun, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Prepare for an evaluation step; check the first one of each kind. *Collective* over the world in this one.

        Args:
            engine: the run of FSDP.
            step: `validation_step`, `test_step` or `predict_step` of the strategy, without what the engine adds.
            args: its arguments.

        Raises:
            ConfigurationError: splitting the layers changes what the step returns or logs.
        """

        def run(batch: Any) -> Any:
            self._logged.clear()
            return gather_split((engine.evaluation_step(step, (batch, *args[1:]), {}), *self._logged))

        self.split.begin_step()
        self.check(args[0], run, step.__name__)

    def check(self, batch: Any, step: Step, what: str = "training_step") -> None:
        """Check in the first step of a kind that splitting the layers changes no result and no gradient. *Collective*.

        Args:
            batch: the batch of the step.
            step: runs the step, and its backward pass, on other batches.
            what: the name of the step.

        Raises:
            ConfigurationError: it does.
        """
        if what in self._checked:
            return
        self._checked.add(what)
        obstacle = f"{what} draws its batches itself" if isinstance(batch, Iterator) else self._shortage()
        if obstacle is not None:
            rank_zero_info(f"The plan of tensor parallelism is not checked: {obstacle}.")
            return
        vars(self._module)["log"] = lambda name, value, *_, **__: self._logged.append(value)
        try:
            check_split(self._module, batch, step, self.split, self._averaged, what)
        finally:
            vars(self._module).pop("log", None)
            self._logged.clear()
        self.split.begin_step()

    def _shortage(self) -> str | None:
        """Return why a rank lacks memory for the whole module and its gradients, or `None`. *Collective*."""
        num_bytes = 2 * sum(each.numel() * each.element_size() for each in self._module.parameters())
        if self._device.type != "cuda":
            return host_memory_shortage(num_bytes, self._ranks_per_node)
        fits = num_bytes < torch.cuda.mem_get_info(self._device)[0] // 2
        return None if every_rank(fits) else f"the whole module would need {num_bytes / 1e9:,.1f} GB on each device"

    def share_random_states(self) -> None:
        """Give all tensor ranks the random states of the first one. *Collective* over the tensor ranks.

        Activations that they have in full must get equal dropout masks, also if code on some ranks has drawn numbers.
        """
        devices = [self._device]
        shared = broadcast_from_first_rank(current_states(devices), self._mesh.get_group())
        restore_states([shared], RankGroup(), devices)


def _check_not_compiled(module: LightningModule) -> None:
    """Raise a `ConfigurationError` if a part of `module` is compiled: it could not take tensors that are split."""
    for name, part in module.named_modules():
        if is_compiled(part):
            raise ConfigurationError(
                f"tensor_parallel cannot be used with compiled modules, such as {name or 'the module'}, which take "
                "whole tensors only. Do not compile them, or train with paral_fsdp."
            )


def gather_split(output: Any) -> Any:
    """Return what a step returns, with ordinary tensors in place of split ones. *Collective* if there are any."""
    return tree_map_only(SplitTensor, SplitTensor.full, output)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _summary(plan: TensorPlan, num_ranks: int) -> str:
    whole = f"; {len(plan.whole)} stay whole" if plan.whole else ""
    return (
        f"Tensor parallel over {num_ranks} ranks: {len(plan.splits)} layers are split{whole}. "
        f"`paral plan --tensor-parallel {num_ranks}` lists them."
    )
