"""DeepSpeed's configuration, made of the strategy's arguments, the Trainer's, and what the user adds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_paral.engines.zero.runtime.config_keys import check_keys
from lightning_paral.errors import ConfigurationError

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
"""What `Trainer(precision=...)` may be under ZeRO."""

_OWNED = {
    "train_batch_size": "the batch size of your dataloader decides",
    "train_micro_batch_size_per_gpu": "the batch size of your dataloader decides",
    "gradient_accumulation_steps": "use Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "use Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)",
    "optimizer": "return the optimizer from configure_optimizers",
    "scheduler": "return the scheduler from configure_optimizers",
}

_EQUIVALENT_PRECISIONS = {
    "fp16": "16-true",
    "bf16": "bf16-true",
    "bfloat16": "bf16-true",
    "torch_autocast": "bf16-mixed",
}
"""By section of DeepSpeed's configuration: the Trainer's precision that has the same effect."""

# The user may change these.
_DEFAULTS: dict[str, Any] = {
    "steps_per_print": 2**62,
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
}


def load_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the user's DeepSpeed configuration, from a dict or a JSON file.

    Raises:
        ConfigurationError: it is no such file, has unknown keys, or sets what belongs to Lightning.
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
            f"deepspeed_config has to be a dict or a JSON file of one, not {type(config).__name__}."
        )
    check_keys(config)
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("compute_grad_norm", True) not in (True, "auto"):
        raise ConfigurationError(
            "deepspeed_config sets zero_optimization.compute_grad_norm=False. The norm is needed for clipping, and to "
            "find steps whose gradients are not finite. Take it out."
        )
    for key, remedy in _OWNED.items():
        if config.get(key, "auto") != "auto":  # "auto" is how configurations written for others leave it open
            raise ConfigurationError(
                f"deepspeed_config sets {key}={config[key]!r}, which belongs to Lightning: {remedy}, and take it out."
            )
    return {key: value for key, value in config.items() if key not in _OWNED}


def precision_section(precision: str) -> dict[str, Any]:
    """Return the sections of a precision: autocast over fp32 weights, or low-precision weights with fp32 masters."""
    if precision.endswith("-mixed"):
        dtype = "float16" if precision.startswith("16") else "bfloat16"
        # No "safe" modules: gradients are averaged and parameters gathered in fp32, as under DDP. DeepSpeed would do
        # both in `dtype` for the parameters of linear layers, tied ones included, wherever they are used. It has one
        # dtype for both, and gradients of gathered copies would be added up in it as well: other numbers than DDP's.
        return {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}}
    if precision == "bf16-true":
        return {"bf16": {"enabled": True}}
    if precision == "16-true":
        return {"fp16": {"enabled": True}}
    return {}


def check_users_precision(precision: str, users: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` if the user's DeepSpeed configuration asks for another precision than the Trainer.

    Args:
        precision: what `Trainer(precision=...)` says.
        users: the user's DeepSpeed configuration.
    """
    ours = precision_section(precision)
    for section, wanted in _EQUIVALENT_PRECISIONS.items():
        value = users.get(section)
        enabled = value.get("enabled") if isinstance(value, Mapping) else None
        given = ours.get("bf16" if section == "bfloat16" else section, {}).get("enabled", False)
        if enabled not in (None, "auto", given):
            remedy = f"Set Trainer(precision={wanted!r}) for it" if enabled else "Leave the precision to the Trainer"
            raise ConfigurationError(
                f"deepspeed_config has {section}.enabled={enabled!r}, but Trainer(precision={precision!r}) says "
                f"otherwise. {remedy}, and take {section!r} out of deepspeed_config."
            )


def add_device_defaults(
    section: dict[str, Any], stage: int, num_elements: int, *, device_type: str, num_ranks: int
) -> dict[str, Any]:
    """Return `section` with defaults for this kind of device.

    On CUDA these are bucket sizes bounded by the size of the model, and at stages 1 and 2 overlap, as in Lightning;
    everything else is left to DeepSpeed. The other settings made here are for gloo.

    Args:
        section: DeepSpeed's section `zero_optimization`, as set by the user and the strategy.
        stage: ZeRO stage.
        num_elements: number of elements of all trained parameters.
        device_type: `"cuda"` or `"cpu"`.
        num_ranks: number of ranks.
    """
    # Messages of 200 MB cost no more per byte than DeepSpeed's 2 GB, whose buffers even small models would allocate.
    bucket = max(2, min(50_000_000, num_elements + num_elements % 2))
    sizes: dict[str, Any] = {"reduce_bucket_size": bucket}
    if stage < 3:
        sizes["allgather_bucket_size"] = bucket
    else:
        sizes["stage3_prefetch_bucket_size"] = min(bucket, num_elements // 8)
    if device_type == "cuda":
        if stage < 3 and num_ranks > 1:  # one rank has no traffic to hide; stage 3 overlaps by default
            sizes["overlap_comm"] = True
    elif stage < 3:
        # Each gradient goes to the rank that needs it: the paper's 2(N-1)/N. DeepSpeed would all-reduce them: 3(N-1)/N,
        # which is faster on NCCL: one message per bucket, in place of one per rank.
        sizes["use_multi_rank_bucket_allreduce"] = False
    else:
        # A parameter is released after forward, and gathered again for backward: the paper's 3(N-1)/N. CPU has no
        # second stream to prefetch on, and prefetching sent a sixth more (DeepSpeed 0.19.8).
        sizes |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return sizes | section


def merge(ours: Mapping[str, Any], users: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return both configurations as one. What the user leaves open by `"auto"` is ours or DeepSpeed's default.

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
                f"{merged[key]!r}. Make them agree, or take it out of deepspeed_config."
            )
        else:
            merged[key] = value
    return merged


def complete(ours: Mapping[str, Any], users: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that DeepSpeed gets."""
    config = _DEFAULTS | merge(ours, users)
    if "steps_per_print" not in users:
        # It would wait for the device twice in every step, to measure what is not reported.
        config.setdefault("timers", {"throughput": {"enabled": False}})
    # Lightning clips, accumulates and draws batches; DeepSpeed wants a number for each.
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
