"""The options of `ParalZeROStrategy`: expand shorthands, reject contradictions, build DeepSpeed's configuration."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import AtLeast, Positive
from lightning_paral.options import Offload, RankOptions
from lightning_paral.planning.layout import Layout, Place
from lightning_paral.text import did_you_mean, nearest_names

PATH_VARIABLE = "PARAL_NVME_PATH"
"""The environment variable that contains the folder for `"nvme"`, and thus for `strategy="paral_zero3_nvme"`."""


@dataclass(frozen=True, kw_only=True)
class ZeROOptions(RankOptions):
    """The options of `ParalZeROStrategy`.

    Args:
        stage: what is sharded: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
        offload_optimizer: keep the optimizer state and the fp32 parameters in host memory or on NVMe, and run the
            optimizer on the CPU. `"cpu"` is short for `Offload("cpu")`; `"nvme"` is short for an `Offload` to the
            folder in the environment variable PARAL_NVME_PATH.
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
        "offload_optimizer_device": "Use offload_optimizer='cpu' or 'nvme'.",
        "config": "Use deepspeed_config=....",
        "zero_optimization": "Use deepspeed_config={'zero_optimization': {...}}.",
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

    def check_precision(self, precision: str, device: torch.device) -> None:
        """Raise a `ConfigurationError` for fp16 on CPU, or if `deepspeed_config` sets another precision."""
        if precision.startswith("16") and device.type == "cpu":
            raise ConfigurationError(
                f"precision={precision!r} is fp16, which DeepSpeed does not support on CPU. Use 'bf16-{precision[3:]}'."
            )
        merge(precision_section(precision), self.users_config)

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
            # DeepSpeed would replace torch's `linear` in this process for good; see `ZeroRun`.
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


# DeepSpeed's configuration

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
"""The values of `Trainer(precision=...)` that ZeRO supports."""

_OWNED = {
    "train_batch_size": "set the batch size of your dataloader",
    "train_micro_batch_size_per_gpu": "set the batch size of your dataloader",
    "gradient_accumulation_steps": "use Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "use Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)",
    "optimizer": "return the optimizer from configure_optimizers",
    "scheduler": "return the scheduler from configure_optimizers",
}
"""Maps each key that Lightning controls to what the user should do instead."""

_REFUSED = {
    "compute_grad_norm": ((True,), "The norm is needed to clip gradients and to detect those that are not finite."),
    "round_robin_gradients": (
        (False,),
        "With it DeepSpeed 0.19.8 stores weights in an order that it does not tell: checkpoints would be wrong.",
    ),
    "offload_optimizer.ratio": ((1,), "The optimizer is offloaded as a whole."),
    "offload_optimizer.device": (
        ("cpu", "none"),
        "Set ParalZeROStrategy(offload_optimizer=Offload('nvme', path=...)).",
    ),
    "offload_param.device": (("cpu", "none"), "Set ParalZeROStrategy(offload_parameters=Offload('nvme', path=...))."),
}
"""Maps an option of ZeRO to the values that are accepted, and why."""

_TOP_LEVEL = """
activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
compression_training csv_monitor data_efficiency data_types dataloader_drop_last datastates disable_allgather
disable_python_gc dump_state elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers torch_autocast
train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wandb
wall_clock_breakdown weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
zero_optimization
"""
_KNOWN = frozenset(_TOP_LEVEL.split())
"""The keys at the top level, where DeepSpeed ignores unknown ones. In the section of ZeRO it refuses them itself."""

_CUDA_BUCKET = 50_000_000
"""Elements. Messages of 200 MB are as fast per byte as those of DeepSpeed's default, 2 GB, for which it allocates."""

_CPU_BUCKET = 6_553_600
"""Elements: 25 MiB of fp32, as in DDP. On gloo, larger messages are not faster."""

# The user's configuration may override these.
_DEFAULTS: dict[str, Any] = {
    "steps_per_print": 2**62,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # torch's fused Adam is as fast, and needs no compiler
    "wall_clock_breakdown": False,
}


def load_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the user's DeepSpeed configuration, from a dict or a JSON file, without keys that Lightning controls.

    Raises:
        ConfigurationError: the file does not exist or is not JSON, a key is unknown, or Lightning controls a setting.
    """
    if config is None:
        return {}
    if isinstance(config, str | Path):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"deepspeed_config={str(config)!r} is not a JSON file: {error}. Give the path of one, or a dict."
            ) from error
    zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(zero, Mapping):
        raise ConfigurationError(
            f"deepspeed_config must be a dict or a JSON file that contains one, and so must its section "
            f"zero_optimization, not {config!r}."
        )
    for key in config:
        # Keys with an underscore are used for comments, which JSON lacks.
        if isinstance(key, str) and not key.startswith("_") and key not in _KNOWN:
            near = did_you_mean(nearest_names(key, _KNOWN, 2, 0.75), quoted=True)
            raise ConfigurationError(
                f"deepspeed_config has {key!r} at the top level, where DeepSpeed does not know it. "
                f"{near or 'Options of ZeRO belong to the section zero_optimization.'}"
            )
    for key, (allowed, reason) in _REFUSED.items():
        section, _, option = key.rpartition(".")
        of_section = zero.get(section) if section else zero
        value = of_section.get(option) if isinstance(of_section, Mapping) else None
        if value not in (None, "auto", *allowed):
            raise ConfigurationError(
                f"deepspeed_config sets zero_optimization.{key}={value!r}. {reason} Remove the setting."
            )
    for key, remedy in _OWNED.items():
        if config.get(key, "auto") != "auto":  # Hugging Face's Trainer and Accelerate fill in "auto"
            raise ConfigurationError(
                f"deepspeed_config sets {key}={config[key]!r}, which Lightning controls: {remedy}, and remove {key}."
            )
    return {"bf16" if key == "bfloat16" else key: value for key, value in config.items() if key not in _OWNED}


def precision_section(precision: str) -> dict[str, Any]:
    """Return the sections of DeepSpeed's configuration for `Trainer(precision=...)`.

    Precisions that end in "-mixed" mean autocast over fp32 weights, which DeepSpeed does not see; "bf16-true" and
    "16-true" mean low-precision weights with fp32 master weights.
    """
    return {
        "torch_autocast": {"enabled": False},
        "bf16": {"enabled": precision == "bf16-true"},
        "fp16": {"enabled": precision == "16-true"},
    }


def add_device_defaults(
    section: dict[str, Any], stage: int, num_elements: int, *, device_type: str, num_ranks: int
) -> dict[str, Any]:
    """Return `section` with defaults for the device type added. Values already in `section` take precedence.

    Bucket sizes are bounded by the size of the model. On CUDA, stages 1 and 2 overlap gradient reduction with the
    backward pass, as Lightning's `DeepSpeedStrategy` does. On CPU, the other defaults are for gloo, and buckets are
    small, because they take memory that ZeRO has saved.

    What a rank holds on CPU in fp32 with torch's Adam, without offload, in bytes: P = 4 x elements, S = P/N, B = 4 x
    `reduce_bucket_size`, u = the largest parameter, k = the parameters that stage 3 keeps gathered:

    - Stages 1 and 2, at rest: P + 2S + B. Backward adds P of gradients at stage 1, S at stage 2, and (N-1)B that
      arrive. The step adds to the state at rest 2S for gradients and their flat copy.
    - Stage 3, at rest: weights S + moments 2S + gradients S + B + k. Backward adds one module in full with its
      gradients, a copy of a bucket, B or u, and a chunk for each other rank. The step adds the gradients of a
      sub-group (`sub_group_size`, by default as large as a bucket).

    Args:
        section: the section `zero_optimization` of DeepSpeed's configuration, as set by the user and the strategy.
        stage: the ZeRO stage, 1 to 3.
        num_elements: the number of elements of all trained parameters.
        device_type: `"cuda"` or `"cpu"`.
        num_ranks: the number of ranks.
    """
    largest = _CPU_BUCKET if device_type == "cpu" else _CUDA_BUCKET
    bucket = max(2, min(largest, num_elements + num_elements % 2))
    sizes: dict[str, Any] = {"reduce_bucket_size": bucket}
    if stage < 3:
        sizes["allgather_bucket_size"] = bucket
    else:
        sizes["stage3_prefetch_bucket_size"] = min(bucket, num_elements // 8)
    if device_type == "cuda":
        if stage < 3 and num_ranks > 1:  # one rank has no traffic to hide; stage 3 overlaps by default
            sizes["overlap_comm"] = True
    elif stage < 3:
        # Reduce each gradient to the one rank that updates it. With the all-gather of parameters, a rank sends
        # 2(N-1)/N of the model per step, as in the ZeRO paper. DeepSpeed's default, an all-reduce, sends 3(N-1)/N. It
        # is faster on NCCL, because it needs one message per bucket instead of one per rank.
        sizes["use_multi_rank_bucket_allreduce"] = False
    else:
        # Free each parameter after the forward pass, and gather it again for the backward pass: a rank sends 3(N-1)/N
        # of the model per step, as in the paper. Prefetching sends a sixth more (measured with DeepSpeed 0.19.8), and
        # hides nothing, because CPU has no second stream.
        sizes |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return sizes | section


def merge(ours: Mapping[str, Any], users: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return both configurations as one. Where the user's value is `"auto"`, ours or DeepSpeed's default is used.

    Args:
        ours: the configuration made from the arguments of the strategy and the Trainer.
        users: the user's DeepSpeed configuration.
        path: the dotted name of the section that is merged, for messages.

    Raises:
        ConfigurationError: both set the same key to different values.
    """
    merged = dict(ours)
    for key, value in users.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and isinstance(merged.get(key, {}), Mapping):
            merged[key] = merge(merged.get(key, {}), value, name)
        elif value == "auto":
            continue
        elif key in merged and merged[key] != value:
            raise ConfigurationError(
                f"deepspeed_config sets {name}={value!r}, but the strategy's arguments and the Trainer, such as its "
                f"precision, say {merged[key]!r}. Make them agree, or remove {name} from deepspeed_config."
            )
        else:
            merged[key] = value
    return merged


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` for an evaluation, with parameters in host memory if a fit has them on NVMe, and no optimizer."""
    zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero["offload_param"] = {"device": "cpu", "pin_memory": zero["offload_param"]["pin_memory"]}
    return {**config, "zero_optimization": zero}


def complete(ours: Mapping[str, Any], users: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full configuration for DeepSpeed: both configurations merged, and the keys that it requires."""
    config = _DEFAULTS | merge(ours, users)
    if "steps_per_print" not in users:
        # This timer would synchronize with the device twice per step to measure a throughput that nobody prints.
        config.setdefault("timers", {"throughput": {"enabled": False}})
    # Lightning batches, accumulates and clips, so these values, which DeepSpeed requires, have no effect.
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
