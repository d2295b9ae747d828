"""What the stages of a pipeline take from another room: shards of FSDP2."""

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_paral.compat.lightning.loops import evaluate_without_inference_mode
from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.refusals import check_module, check_pruning, check_user_hooks
from lightning_paral.engines.fsdp.step_shards import StepShards


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
