"""Explain unknown options: misspelled options, and options of another class, of Lightning or of DeepSpeed."""

from collections.abc import Collection

from lightning_paral.suggestions import did_you_mean, nearest_names

_OPTIONS_BY_CLASS: dict[str, set[str]] = {}

_EQUIVALENTS = {
    "ParalFSDPStrategy": {
        "auto_wrap_policy": "units=..., with classes, their names, or a function of name and module",
        "activation_checkpointing_policy": "activation_checkpointing=ActivationCheckpointing(units=...)",
        "cpu_offload": "offload=True",
        "mixed_precision": "Trainer(precision=...), and reduce_dtype=...",
        "sharding_strategy": "reshard_after_forward=False for SHARD_GRAD_OP, replicate=... for HYBRID_SHARD, and "
        "paral_ddp for NO_SHARD",
        "device_mesh": "replicate=...",
        "data_parallel_size": "replicate=...",
        "state_dict_type": "checkpoint='full' or 'sharded'",
        "save_distributed_checkpoint": "checkpoint='full' or 'sharded'",
        "use_orig_params": "Leave it out: FSDP2 always keeps the original parameters",
        "sync_module_states": "Leave it out: all ranks start with rank 0's values",
        "backward_prefetch": "prefetch=...",
        "forward_prefetch": "prefetch=...",
        "limit_all_gathers": "prefetch=...",
    },
    "ParalZeROStrategy": {
        "offload_params": "offload_parameters='cpu'",
        "offload_params_device": "offload_parameters='cpu' or 'nvme'",
        "offload_param": "offload_parameters='cpu' or 'nvme'",
        "offload_optimizer_device": "offload_optimizer='cpu' or 'nvme'",
        "nvme_path": "offload_optimizer=Offload('nvme', path=...)",
        "remote_device": "offload_parameters='cpu' or 'nvme'",
        "config": "deepspeed_config=...",
        "zero_optimization": "deepspeed_config={'zero_optimization': {...}}",
        "zero_stage": "stage=...",
        "reduce_bucket_size": "reduce_bucket_numel=...",
        "allgather_bucket_size": "gather_bucket_numel=...",
        "contiguous_gradients": "deepspeed_config={'zero_optimization': {'contiguous_gradients': ...}}",
        "logging_batch_size_per_gpu": "Leave it out: the loader determines the batch size",
        "cpu_checkpointing": "activation_checkpointing=ActivationCheckpointing(offload_to_cpu=True)",
        "partition_activations": "activation_checkpointing=ActivationCheckpointing(...)",
        "initial_scale_power": "deepspeed_config={'fp16': {...}}",
        "load_full_weights": "Leave it out: full and sharded checkpoints are recognized",
    },
    "ParalDPStrategy": {
        "timeout": "paral_ddp, which has several processes; paral_dp has one",
        "process_group_backend": "paral_ddp, which has several processes; paral_dp has one",
    },
}
"""For each class: options of Lightning's strategies and of DeepSpeed, and their replacements."""


def register_options(owner: str, options: Collection[str]) -> None:
    """Register the `options` of the class named `owner`, so that messages can suggest them."""
    _OPTIONS_BY_CLASS.setdefault(owner, set()).update(options)


def has_registered_options(owner: str) -> bool:
    """Return whether the class named `owner` has registered its options."""
    return owner in _OPTIONS_BY_CLASS


def explain_unknown_option(owner: str, option: str) -> str:
    """Return a message that `owner` has no `option`, with suggestions."""
    return f"{owner} has no option {option!r}.{_hint(owner, option, _OPTIONS_BY_CLASS[owner])}"


def _hint(owner: str, option: str, known: Collection[str]) -> str:
    instead = _EQUIVALENTS.get(owner, {}).get(option)
    if instead is not None:
        return f" {instead}." if instead.startswith("Leave it out") else f" Use {instead}."
    near = nearest_names(option, known)
    if not near and len(option) > 3:
        near = [name for name in sorted(known) if option in name or name in option]
    if near:
        return f" {did_you_mean(near[:3])}"
    others = [
        name for name, options in sorted(_OPTIONS_BY_CLASS.items()) if option in options and name.startswith("Paral")
    ]
    if others:
        return f" It is an option of {' and of '.join(others)}."
    return f" Its options are {', '.join(sorted(set(known) - _SET_BY_TRAINER))}."


_SET_BY_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin", "checkpoint_io"}
