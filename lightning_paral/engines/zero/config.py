"""Build DeepSpeed's configuration from the arguments of the strategy, those of the Trainer, and the user's settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_paral.errors import ConfigurationError
from lightning_paral.text import did_you_mean, nearest_names

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

_EQUIVALENT_PRECISIONS = {
    "fp16": "16-true",
    "bf16": "bf16-true",
    "bfloat16": "bf16-true",
    "torch_autocast": "bf16-mixed",
}
"""Maps a section of DeepSpeed's configuration to the value of `Trainer(precision=...)` with the same effect."""

_CUDA_BUCKET = 50_000_000
"""Elements. Messages of 200 MB are as fast per byte as those of DeepSpeed's default, 2 GB, for which it allocates."""

_CPU_BUCKET = 6_553_600
"""Elements: 25 MiB of fp32, as in DDP. On gloo, larger messages are not faster."""

# The user's configuration may override these.
_DEFAULTS: dict[str, Any] = {
    "steps_per_print": 2**62,
    "zero_allow_untested_optimizer": True,
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
        path = Path(config)
        if not path.is_file():
            raise ConfigurationError(f"deepspeed_config={str(config)!r} is not a file. Give a JSON file or a dict.")
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"deepspeed_config={str(path)!r} is not JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"deepspeed_config must be a dict, or a JSON file that contains one, not {type(config).__name__}."
        )
    for key in config:
        # Keys with an underscore are used for comments, which JSON lacks.
        if isinstance(key, str) and not key.startswith("_") and key not in _KNOWN:
            near = did_you_mean(nearest_names(key, _KNOWN, 2, 0.75), quoted=True)
            raise ConfigurationError(
                f"deepspeed_config has {key!r} at the top level, where DeepSpeed does not know it. "
                f"{near or 'Options of ZeRO belong to the section zero_optimization.'}"
            )
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigurationError(
            f"deepspeed_config has zero_optimization={zero!r}, which is a section: give a dict of its options."
        )
    if zero.get("compute_grad_norm", True) not in (True, "auto"):
        raise ConfigurationError(
            "deepspeed_config sets zero_optimization.compute_grad_norm=False. The norm is needed to clip gradients and "
            "to detect gradients that are not finite. Remove the setting."
        )
    if zero.get("round_robin_gradients", False) not in (False, "auto"):
        raise ConfigurationError(
            "deepspeed_config sets zero_optimization.round_robin_gradients=True, with which DeepSpeed 0.19.8 stores "
            "weights in an order that it does not tell: checkpoints would be wrong. Remove the setting."
        )
    offload = zero.get("offload_optimizer")
    if isinstance(offload, Mapping) and offload.get("ratio", 1.0) not in (1, "auto"):
        raise ConfigurationError(
            f"deepspeed_config sets zero_optimization.offload_optimizer.ratio={offload['ratio']!r}, but the optimizer "
            "is offloaded as a whole. Remove the setting."
        )
    for key, remedy in _OWNED.items():
        if config.get(key, "auto") != "auto":  # Hugging Face's Trainer and Accelerate fill in "auto"
            raise ConfigurationError(
                f"deepspeed_config sets {key}={config[key]!r}, which Lightning controls: {remedy}, and remove {key}."
            )
    return {key: value for key, value in config.items() if key not in _OWNED}


def precision_section(precision: str) -> dict[str, Any]:
    """Return the sections of DeepSpeed's configuration for `Trainer(precision=...)`.

    Precisions that end in "-mixed" mean autocast over fp32 weights; "bf16-true" and "16-true" mean low-precision
    weights with fp32 master weights.
    """
    if precision.endswith("-mixed"):
        dtype = "float16" if precision.startswith("16") else "bfloat16"
        # By default DeepSpeed gathers the parameters of linear layers, and averages and accumulates their gradients, in
        # `dtype`, even where a tied parameter is used elsewhere. With an empty list of modules that are safe in low
        # precision, it does so in fp32, as DDP does.
        return {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}}
    if precision == "bf16-true":
        return {"bf16": {"enabled": True}}
    if precision == "16-true":
        return {"fp16": {"enabled": True}}
    return {}


def check_users_precision(precision: str, users: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` if the user's DeepSpeed configuration contradicts the precision of the Trainer.

    Args:
        precision: the value of `Trainer(precision=...)`.
        users: the user's DeepSpeed configuration.
    """
    ours = precision_section(precision)
    for section, wanted in _EQUIVALENT_PRECISIONS.items():
        value = users.get(section)
        enabled = value.get("enabled") if isinstance(value, Mapping) else None
        given = ours.get("bf16" if section == "bfloat16" else section, {}).get("enabled", False)
        if enabled not in (None, "auto", given):
            remedy = f"Set Trainer(precision={wanted!r}) instead" if enabled else "Let the Trainer set the precision"
            raise ConfigurationError(
                f"deepspeed_config sets {section}.enabled={enabled!r}, which contradicts "
                f"Trainer(precision={precision!r}). {remedy}, and remove {section!r} from deepspeed_config."
            )


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
        elif key in merged and merged[key] != value and key != "lower_precision_safe_modules":
            raise ConfigurationError(
                f"deepspeed_config sets {name}={value!r}, but the strategy's arguments and the Trainer say "
                f"{merged[key]!r}. Make them agree, or remove {name} from deepspeed_config."
            )
        else:
            merged[key] = value
    return merged


def complete(ours: Mapping[str, Any], users: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full configuration for DeepSpeed: both configurations merged, and the keys that it requires."""
    config = _DEFAULTS | merge(ours, users)
    if "steps_per_print" not in users:
        # This timer would synchronize with the device twice per step to measure a throughput that nobody prints.
        config.setdefault("timers", {"throughput": {"enabled": False}})
    # Lightning batches, accumulates and clips, so these values, which DeepSpeed requires, have no effect.
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
