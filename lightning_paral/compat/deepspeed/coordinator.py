"""The coordinator of a stage-3 engine, which gathers and releases parameters."""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".parameter_offload": "make several engines gather parameters through the same coordinator (deepspeed#1229)",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": {
        ".param_coordinator": "make several engines gather parameters through the same coordinator (deepspeed#1229)",
    },
}


def share_coordinator(gathering: Any, training: Any) -> None:
    """Make the engine `training` use the coordinator of the engine `gathering`, which runs the forward pass."""
    training.optimizer.parameter_offload.param_coordinator = gathering.optimizer.param_coordinator
