"""The coordinator of an engine of stage 3, which gathers and releases parameters."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.parameter_offload",
        purpose="to let several engines gather parameters through one",
        reason="an engine takes one optimizer, and several engines know nothing of each other's gathering",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.param_coordinator",
        purpose="to let several engines gather parameters through one",
        reason="an engine takes one optimizer, and several engines know nothing of each other's gathering",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
)


def share_coordinator(gathering: Any, training: Any) -> None:
    """Let the engine `training` release and gather parameters through `gathering`, which runs the forwards."""
    training.optimizer.parameter_offload.param_coordinator = gathering.optimizer.param_coordinator
