"""The options of `ParalZeROStrategy`: expand shorthands, reject contradictions, build DeepSpeed's configuration."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from lightning_paral.engines.zero.config import complete, load_config, merge, precision_section
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import AtLeast, Positive
from lightning_paral.options import Offload, RankOptions
from lightning_paral.planning.layout import Layout, Place

PATH_VARIABLE = "PARAL_NVME_PATH"
"""The environment variable that contains the folder for `"nvme"`, and thus for `strategy="paral_zero3_nvme"`."""


@dataclass(frozen=True, kw_only=True)
class ZeROOptions(RankOptions):
    """The options of `ParalZeROStrategy`.

    Args:
        stage: what is sharded: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
        offload_optimizer: keep the optimizer state and the fp32 parameters in host memory or on NVMe, and run the
            optimizer on the CPU. torch's Adam and AdamW are replaced by `DeepSpeedCPUAdam` with the same
            hyper-parameters. `"cpu"` is short for `Offload("cpu")`; `"nvme"` is short for an `Offload` to the folder in
            the environment variable PARAL_NVME_PATH.
        offload_parameters: at stage 3, keep parameters in host memory or on NVMe while they are not in use.
        trust_optimizer: accept an optimizer that is not one of the elementwise ones of `torch.optim`. ZeRO passes
            flattened shards of the parameters to the optimizer, which must update each element by itself.
        overlap_comm: reduce gradients on a separate CUDA stream during the backward pass. `None`: on CUDA with several
            ranks. Has no effect on CPU.
        reduce_bucket_numel: the number of gradient elements that are reduced at a time. `None`: 50 million, or all if
            there are fewer.
        gather_bucket_numel: the number of parameter elements that are gathered at a time; at stage 3, they are gathered
            ahead of use. `None`: at most 50 million, depending on the size of the model.
        deepspeed_config: further settings of DeepSpeed's configuration, as a dict or the path of a JSON file.
        broadcast_buffers: broadcast rank 0's buffers to all ranks, as DDP does: before the training step that begins an
            accumulation window, and at the start of validation.
        logging_level: the lowest level of `logging` at which DeepSpeed's own messages are shown.

    Raises:
        ConfigurationError: the stage does not support the offload, or an option contradicts `deepspeed_config`.
    """

    stage: Literal[1, 2, 3] = 2
    offload_optimizer: Offload | Literal["cpu", "nvme"] | None = None
    offload_parameters: Offload | Literal["cpu", "nvme"] | None = None
    trust_optimizer: bool = False
    overlap_comm: bool | None = None
    reduce_bucket_numel: Positive | None = None
    gather_bucket_numel: Annotated[int, AtLeast(0)] | None = None
    deepspeed_config: dict[str, Any] | str | Path | None = None
    broadcast_buffers: bool = True
    logging_level: int = logging.ERROR

    users_config: Mapping[str, Any] = field(init=False, repr=False, default_factory=dict)
    """The user's DeepSpeed configuration, as `load_config` returns it."""

    advice: ClassVar[dict[str, str]] = {
        **RankOptions.advice,
        "offload_params": "Use offload_parameters='cpu'.",
        "offload_params_device": "Use offload_parameters='cpu' or 'nvme'.",
        "offload_param": "Use offload_parameters='cpu' or 'nvme'.",
        "offload_optimizer_device": "Use offload_optimizer='cpu' or 'nvme'.",
        "nvme_path": "Use offload_optimizer=Offload('nvme', path=...).",
        "remote_device": "Use offload_parameters='cpu' or 'nvme'.",
        "config": "Use deepspeed_config=....",
        "zero_optimization": "Use deepspeed_config={'zero_optimization': {...}}.",
        "zero_stage": "Use stage=....",
        "reduce_bucket_size": "Use reduce_bucket_numel=....",
        "allgather_bucket_size": "Use gather_bucket_numel=....",
        "contiguous_gradients": "Use deepspeed_config={'zero_optimization': {'contiguous_gradients': ...}}.",
        "logging_batch_size_per_gpu": "Leave it out: the loader determines the batch size.",
        "cpu_checkpointing": "Use activation_checkpointing=ActivationCheckpointing(offload_to_cpu=True).",
        "partition_activations": "Use activation_checkpointing=ActivationCheckpointing(...).",
        "initial_scale_power": "Use deepspeed_config={'fp16': {...}}.",
        "find_unused_parameters": "Under ZeRO, every backward pass must reach every trained parameter. Use paral_fsdp.",
        "load_full_weights": "Leave it out: full and sharded checkpoints are recognized.",
        "stage": "1 shards the optimizer state, 2 also the gradients, 3 also the parameters.",
        "logging_level": "It is a level of logging, such as logging.INFO.",
        "deepspeed_config": "A string is the path of a JSON file.",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("offload_optimizer", "offload_parameters"):
            device = getattr(self, option)
            if device in ("cpu", "nvme"):
                object.__setattr__(self, option, Offload(device, path=os.environ.get(PATH_VARIABLE)))
        object.__setattr__(self, "users_config", load_config(self.deepspeed_config))
        self._check_stage()
        merge(self.section(pin_memory=False), self.users_config.get("zero_optimization", {}))

    @property
    def optimizer_offload(self) -> Offload | None:
        """The option `offload_optimizer`; a string is the `device`."""
        assert not isinstance(self.offload_optimizer, str)
        return self.offload_optimizer

    @property
    def parameter_offload(self) -> Offload | None:
        """The option `offload_parameters`; a string is the `device`."""
        assert not isinstance(self.offload_parameters, str)
        return self.offload_parameters

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        if self.optimizer_offload is None:
            return f"paral_zero{self.stage}"
        return f"paral_zero{self.stage}_" + ("offload" if self.optimizer_offload.device == "cpu" else "nvme")

    @property
    def layout(self) -> Layout:
        """How a plan counts the strategy."""

        def place(offload: Offload | None) -> Place:
            return "device" if offload is None else "host" if offload.device == "cpu" else "nvme"

        return Layout(
            strategy=self.strategy_name,
            engine="zero",
            stage=self.stage,
            optimizer_place=place(self.optimizer_offload),
            parameter_place=place(self.parameter_offload),
            recomputes=self.activation_checkpointing is not None,
        )

    def _check_stage(self) -> None:
        if self.stage == 3:
            return
        optimizer, at_this_stage = self.optimizer_offload, f"needs stage=3, but stage={self.stage}"
        if self.gather_bucket_numel == 0:
            raise ConfigurationError(f"gather_bucket_numel=0 {at_this_stage}. Give at least 1.")
        if self.parameter_offload is not None:
            raise ConfigurationError(
                f"offload_parameters {at_this_stage}, at which every rank keeps full parameters on its device. Set "
                "stage=3, or leave out offload_parameters."
            )
        if optimizer is not None and optimizer.device == "nvme":
            raise ConfigurationError(f"offload_optimizer=Offload('nvme') {at_this_stage}. Use 'cpu'.")

    def engine_config(self, precision: str, device: torch.device, nvme_folders: Mapping[str, Path]) -> dict[str, Any]:
        """Return DeepSpeed's configuration for a run, without sizes that depend on the module.

        Args:
            precision: the value of `Trainer(precision=...)`.
            device: the device of this rank.
            nvme_folders: the folders of the run on NVMe, by the names of the offloads in DeepSpeed.
        """
        zero = self.section(pin_memory=device.type == "cuda")
        for offload, folder in nvme_folders.items():
            zero[offload]["nvme_path"] = str(folder)
        return complete({"zero_optimization": zero} | precision_section(precision), self.users_config)

    def section(self, pin_memory: bool) -> dict[str, Any]:
        """Return the section `zero_optimization` of DeepSpeed's configuration, without paths on NVMe.

        Args:
            pin_memory: whether offloads that do not set `pin_memory` use pinned memory.
        """
        section: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            # DeepSpeed's `linear` would replace torch's in this process for good. It rounds differently, and gives the
            # gradients of weight and bias in another order, in which ranks without it would not reduce them later.
            section["memory_efficient_linear"] = False
        if self.overlap_comm is not None:
            section["overlap_comm"] = self.overlap_comm
        if self.reduce_bucket_numel is not None:
            section["reduce_bucket_size"] = self.reduce_bucket_numel
        if self.gather_bucket_numel is not None:
            bucket = "stage3_prefetch_bucket_size" if self.stage == 3 else "allgather_bucket_size"
            section[bucket] = self.gather_bucket_numel
        if self.optimizer_offload is not None:
            section["offload_optimizer"] = _device_section(self.optimizer_offload, pin_memory)
        if self.parameter_offload is not None:
            section["offload_param"] = _device_section(self.parameter_offload, pin_memory) | {
                "buffer_size": self.parameter_offload.buffer_numel,
                "max_in_cpu": self.parameter_offload.max_in_cpu_numel,
            }
        return section

    @property
    def on_nvme(self) -> dict[str, Offload]:
        """The offloads to NVMe, by the name of their option."""
        offloads = {"offload_optimizer": self.optimizer_offload, "offload_parameters": self.parameter_offload}
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


def check_precision(precision: str, device: torch.device) -> None:
    """Raise a `ConfigurationError` for fp16 on CPU."""
    if precision.startswith("16") and device.type == "cpu":
        raise ConfigurationError(
            f"precision={precision!r} is fp16, which DeepSpeed does not support on CPU. Use 'bf16-{precision[3:]}'."
        )
