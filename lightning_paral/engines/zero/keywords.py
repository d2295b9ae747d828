"""The keywords of `ParalZeROStrategy`, with their documentation."""

import logging
from pathlib import Path
from typing import Any, Literal

from lightning_paral.engines.zero.options import ZeROOptions, as_offload
from lightning_paral.engines.zero.runtime.config import load_config
from lightning_paral.options import Offload, RankOptions, takes_options


class ZeROKeywords(RankOptions, total=False):
    """The keywords of `ParalZeROStrategy`: those of ZeRO, and those of `RankOptions`.

    Args:
        stage: what is sharded: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
        offload_optimizer: keep the optimizer state and the fp32 parameters in host memory or on NVMe, and run the
            optimizer on the CPU. torch's Adam and AdamW are replaced by `DeepSpeedCPUAdam` with the same
            hyper-parameters. `"cpu"` is short for `Offload("cpu")`; `"nvme"` is short for an `Offload` to the folder in
            the environment variable PARAL_NVME_PATH.
        offload_parameters: at stage 3, keep parameters in host memory or on NVMe while they are not in use.
        trust_optimizer: accept an optimizer even if a trial step shows that it is not elementwise, or cannot tell. ZeRO
            passes flattened shards of the parameters to the optimizer.
        find_unused_parameters: in every step, let the ranks agree on the parameters that have no gradient, as in
            `DistributedDataParallel`; these keep their values. Otherwise the first step determines which parameters
            never have one, and gradients that later arrive in a different order are an error, because ranks reduce them
            by position.
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
    """

    stage: Literal[1, 2, 3]
    offload_optimizer: Offload | Literal["cpu", "nvme"] | None
    offload_parameters: Offload | Literal["cpu", "nvme"] | None
    trust_optimizer: bool
    find_unused_parameters: bool
    overlap_comm: bool | None
    reduce_bucket_numel: int | None
    gather_bucket_numel: int | None
    deepspeed_config: dict[str, Any] | str | Path | None
    broadcast_buffers: bool
    logging_level: int


_DEFAULTS = {
    "stage": 2,
    "offload_optimizer": None,
    "offload_parameters": None,
    "trust_optimizer": False,
    "find_unused_parameters": False,
    "overlap_comm": None,
    "reduce_bucket_numel": None,
    "gather_bucket_numel": None,
    "deepspeed_config": None,
    "broadcast_buffers": True,
    "logging_level": logging.ERROR,
}
takes_zero_options = takes_options(ZeROKeywords, _DEFAULTS)
"""Decorate a constructor that takes `**keywords: Unpack[ZeROKeywords]`: its signature lists each of them by name."""


def as_zero_options(given: dict[str, Any]) -> ZeROOptions:
    """Return the options that `given` keywords of ZeRO stand for.

    Raises:
        ConfigurationError: they contradict each other, or contradict the `deepspeed_config` that is one of them.
    """
    keywords = _DEFAULTS | given
    users_config = load_config(keywords.pop("deepspeed_config"))
    for option in ("offload_optimizer", "offload_parameters"):
        keywords[option] = as_offload(keywords[option])
    return ZeROOptions(users_config=users_config, **keywords)
