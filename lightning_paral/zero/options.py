"""The strategy's own options: shorthands, and which of them go together."""

import os

import torch

from lightning_paral.config import Offload
from lightning_paral.errors import ConfigurationError
from lightning_paral.zero import nvme


def as_offload(offload: Offload | str | None) -> Offload | None:
    """Return `"cpu"` and `"nvme"` as the `Offload` they stand for."""
    if isinstance(offload, str):
        return Offload(offload, path=os.environ.get(nvme.PATH_VARIABLE))  # type: ignore[arg-type]
    return offload


def check_stage(stage: object, offload_optimizer: Offload | None, offload_parameters: Offload | None) -> None:
    """Raise a `ConfigurationError` for a stage that does not exist or cannot offload what it is to."""
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f"stage={stage!r} is not one of ZeRO's: 1 divides the optimizer state, 2 gradients, too, 3 parameters, too."
        )
    if stage != 3 and offload_parameters is not None:
        raise ConfigurationError(
            f"offload_parameters needs stage=3, but stage={stage}: below it every rank computes with whole parameters."
        )
    if stage != 3 and offload_optimizer is not None and offload_optimizer.device == "nvme":
        raise ConfigurationError(f"offload_optimizer=Offload('nvme') needs stage=3, but stage={stage}. Use 'cpu'.")
    if stage != 3 and offload_optimizer is not None and offload_optimizer.ratio != 1.0:
        raise ConfigurationError(f"Offload(ratio={offload_optimizer.ratio}) needs stage=3, but stage={stage}.")


def check_precision(precision: str, device: torch.device) -> None:
    """Raise a `ConfigurationError` for fp16 on CPU, and for fp16 autocast, which DeepSpeed gets wrong."""
    if precision.startswith("16") and device.type == "cpu":
        raise ConfigurationError(
            f"precision={precision!r} is fp16, which DeepSpeed does not train in on CPU. Use 'bf16-{precision[3:]}'."
        )
    if precision == "16-mixed":
        raise ConfigurationError(
            "precision='16-mixed' is refused under ZeRO: DeepSpeed 0.19 clips fp16 autocast by the norm of the scaled "
            "gradients and never lowers the scale after an overflow. Use 'bf16-mixed' or '16-true'."
        )
