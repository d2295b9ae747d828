"""The coordinator of a stage-3 engine, which gathers and releases parameters."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.parameter_offload",
        purpose="to let several engines gather parameters through one",
        reason="an engine takes one optimizer, and engines do not know what other engines have gathered",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.param_coordinator",
        purpose="to let several engines gather parameters through one",
        reason="an engine takes one optimizer, and engines do not know what other engines have gathered",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1229",
        on_instances=True,
    ),
)


def share_coordinator(gathering: Any, training: Any) -> None:
    """Let the engine `training` gather and release parameters through the engine `gathering`, which runs forward."""
    training.optimizer.parameter_offload.param_coordinator = gathering.optimizer.param_coordinator
