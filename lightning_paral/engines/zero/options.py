"""The options of `ParalZeROStrategy`: expand shorthands, reject contradictions, build DeepSpeed's configuration."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_paral.engines.zero.runtime import config as settings
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least
from lightning_paral.options import Offload

PATH_VARIABLE = "PARAL_NVME_PATH"
"""The environment variable that contains the folder for `"nvme"`, and thus for `strategy="paral_zero3_nvme"`."""


def as_offload(offload: Offload | str | None) -> Offload | None:
    """Return the `Offload` that `"cpu"` or `"nvme"` is short for; return other arguments unchanged."""
    if isinstance(offload, str):
        return Offload(offload, path=os.environ.get(PATH_VARIABLE))  # type: ignore[arg-type]
    return offload


@dataclass(frozen=True, kw_only=True)
class ZeROOptions:
    """The options of a strategy. `ParalZeROStrategy` documents each of them.

    Raises:
        ConfigurationError: the stage does not exist or does not support the offload, or an option contradicts the
            user's DeepSpeed configuration.
    """

    stage: int
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    overlap_comm: bool | None = None
    reduce_bucket_numel: int | None = None
    gather_bucket_numel: int | None = None
    users_config: Mapping[str, Any] = field(default_factory=dict)
    """The user's DeepSpeed configuration, as `load_config` returns it."""
    trust_optimizer: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    logging_level: int = logging.ERROR

    def __post_init__(self) -> None:
        check_stage(self.stage, self.offload_optimizer, self.offload_parameters)
        check_at_least("ParalZeROStrategy", "reduce_bucket_numel", self.reduce_bucket_numel, 1)
        check_at_least(
            "ParalZeROStrategy", "gather_bucket_numel", self.gather_bucket_numel, 0 if self.stage == 3 else 1
        )
        settings.merge(self.section(pin_memory=False), self.users_config.get("zero_optimization", {}))

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        if self.offload_optimizer is None:
            return f"paral_zero{self.stage}"
        return f"paral_zero{self.stage}_" + ("offload" if self.offload_optimizer.device == "cpu" else "nvme")

    def deepspeed_config(
        self, precision: str, device: torch.device, nvme_folders: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Return DeepSpeed's configuration for a run, without sizes that depend on the module.

        Args:
            precision: the value of `Trainer(precision=...)`.
            device: the device of this rank.
            nvme_folders: the folders of the run on NVMe, by the names of the offloads in DeepSpeed.
        """
        zero = self.section(pin_memory=device.type == "cuda")
        for offload, folder in nvme_folders.items():
            zero[offload]["nvme_path"] = str(folder)
        return settings.complete({"zero_optimization": zero} | settings.precision_section(precision), self.users_config)

    def section(self, pin_memory: bool) -> dict[str, Any]:
        """Return the section `zero_optimization` of DeepSpeed's configuration, without paths on NVMe.

        Args:
            pin_memory: whether offloads that do not set `pin_memory` use pinned memory.
        """
        section: dict[str, Any] = {"stage": self.stage}
        if self.overlap_comm is not None:
            section["overlap_comm"] = self.overlap_comm
        if self.reduce_bucket_numel is not None:
            section["reduce_bucket_size"] = self.reduce_bucket_numel
        if self.gather_bucket_numel is not None:
            bucket = "stage3_prefetch_bucket_size" if self.stage == 3 else "allgather_bucket_size"
            section[bucket] = self.gather_bucket_numel
        if self.offload_optimizer is not None:
            section["offload_optimizer"] = _device_section(self.offload_optimizer, pin_memory) | {
                "ratio": self.offload_optimizer.ratio,
            }
        if self.offload_parameters is not None:
            section["offload_param"] = _device_section(self.offload_parameters, pin_memory) | {
                "buffer_size": self.offload_parameters.buffer_numel,
                "max_in_cpu": self.offload_parameters.max_in_cpu_numel,
            }
        return section

    @property
    def on_nvme(self) -> dict[str, Offload]:
        """The offloads to NVMe, by the name of their option."""
        offloads = {"offload_optimizer": self.offload_optimizer, "offload_parameters": self.offload_parameters}
        return {option: offload for option, offload in offloads.items() if offload and offload.device == "nvme"}


def averaging_obstacle(options: ZeROOptions) -> str | None:
    """Return why weights cannot be averaged with `options`, and what to do; `None` if they can."""
    if "offload_parameters" in options.on_nvme:
        return (
            "with parameters on NVMe, every average would read all of them. Keep them in host memory with "
            'offload_parameters="cpu", or remove the callback.'
        )
    zero = options.users_config.get("zero_optimization", {})
    copies = [key for key in ("zero_hpz_partition_size", "mics_shard_size") if zero.get(key, 0) > 1]
    if copies:
        return (
            f"with {copies[0]}={zero[copies[0]]}, DeepSpeed gathers weights from copies, not from the shards that it "
            "updates. Remove the option or the callback."
        )
    return None


def _device_section(offload: Offload, pin_memory: bool) -> dict[str, Any]:
    return {
        "device": offload.device,
        "pin_memory": pin_memory if offload.pin_memory is None else offload.pin_memory,
        "buffer_count": offload.buffer_count,
    }


def check_stage(stage: object, offload_optimizer: Offload | None, offload_parameters: Offload | None) -> None:
    """Raise a `ConfigurationError` if the stage does not exist, or does not support the offload."""
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f"stage={stage!r} is not a stage of ZeRO. Choose 1 to shard the optimizer state, 2 to shard gradients as "
            "well, or 3 to shard parameters as well."
        )
    if stage != 3 and offload_parameters is not None:
        raise ConfigurationError(
            f"offload_parameters needs stage=3, but stage={stage}, at which every rank keeps full parameters on its "
            "device. Set stage=3, or leave out offload_parameters."
        )
    if stage != 3 and offload_optimizer is not None and offload_optimizer.device == "nvme":
        raise ConfigurationError(f"offload_optimizer=Offload('nvme') needs stage=3, but stage={stage}. Use 'cpu'.")
    if stage != 3 and offload_optimizer is not None and offload_optimizer.ratio != 1.0:
        raise ConfigurationError(
            f"Offload(ratio={offload_optimizer.ratio}) needs stage=3, but stage={stage}. Leave out ratio, or set "
            "stage=3."
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Raise a `ConfigurationError` for fp16 on CPU."""
    if precision.startswith("16") and device.type == "cpu":
        raise ConfigurationError(
            f"precision={precision!r} is fp16, which DeepSpeed does not support on CPU. Use 'bf16-{precision[3:]}'."
        )
