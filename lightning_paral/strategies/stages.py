"""What the stages of a pipeline take from other rooms: shards of FSDP2, and operations that the planner counts."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_paral.compat.lightning.loops import evaluate_without_inference_mode
from lightning_paral.distributed.exchange import explain
from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.refusals import check_module, check_pruning, check_user_hooks
from lightning_paral.engines.fsdp.step_shards import StepShards
from lightning_paral.engines.pipeline.division import check_number_of_units
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.units import Units
from lightning_paral.planning.follow import count_unit_flops


def make_stage_shards(
    module: LightningModule, dims: ParallelDims, device: torch.device, trainer: Trainer, *, is_fit: bool
) -> StepShards | None:
    """Return what shards this rank's stage of `module`; `None` if `dims` has no shards.

    *Collective* over the ranks of the stage.

    Raises:
        ConfigurationError: `module` or a callback cannot be used with shards, or an earlier run left shards in it.
    """
    check_module(module)
    if dims.shard == dims.tensor == 1:
        return None
    evaluate_without_inference_mode(trainer)
    if is_fit:
        check_user_hooks(module)
        check_pruning(vars(trainer)["callbacks"])
    return StepShards(module, dims, make_mesh(device, dims))


class CountedFlops:
    """Counts the operations of the units of each module once.

    With some builds of torch, a process that has trained cannot count again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], ...], list[int]] = {}
        """By the names and numbers of parameters of the units."""

    def of_units(self, strategy: Any, units: Units, trainer: Trainer) -> list[int]:
        """Return the operations of each unit in a training step, which rank 0 counts. *Collective* over the world.

        Args:
            strategy: the strategy, whose ranks have joined.
            units: the units of the chain.
            trainer: the Trainer, which is about to fit.

        Raises:
            ConfigurationError: they cannot be counted, or there are fewer units than stages.
        """
        check_number_of_units(units, strategy.dims.pipeline)
        sizes = tuple((unit.name, unit.num_params) for unit in units.inner)
        outcome: list[int] | str | None = self._known.get(sizes)
        module = strategy.lightning_module
        if strategy.global_rank == 0 and outcome is None:
            names = [unit.name for unit in units.inner]
            try:
                outcome = count_unit_flops(trainer, module, names)
            except (ParalError, OSError) as error:
                outcome = explain(error)
        outcome = strategy.broadcast(outcome)
        if isinstance(outcome, str):
            raise ConfigurationError(
                f"balance='time' cannot count the operations of {type(module).__name__}: {outcome}. Set "
                "balance='params', or give the number of units of each stage."
            )
        assert outcome is not None
        self._known[sizes] = outcome
        return outcome
