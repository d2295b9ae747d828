"""The coordinator of a stage-3 engine, which gathers and releases parameters."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.parameter_offload",
        purpose="to make several engines gather parameters through the same coordinator",
        reason="several optimizers need several engines, and engines have no public way to share gathered parameters",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.param_coordinator",
        purpose="to make several engines gather parameters through the same coordinator",
        reason="several optimizers need several engines, and engines have no public way to share gathered parameters",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
)


def share_coordinator(gathering: Any, training: Any) -> None:
    """Make the engine `training` use the coordinator of the engine `gathering`, which runs the forward pass."""
    training.optimizer.parameter_offload.param_coordinator = gathering.optimizer.param_coordinator
