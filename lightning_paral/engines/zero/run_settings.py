"""The settings of a run under ZeRO, and what is checked of them before it begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.zero.config import check_users_precision
from lightning_paral.engines.zero.options import ZeROOptions, check_precision
from lightning_paral.engines.zero.precision import ZeROPrecision
from lightning_paral.engines.zero.runtime.deepspeed import check_accelerator
from lightning_paral.engines.zero.runtime.nvme import check_offload


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, from the strategy and the Trainer."""

    options: ZeROOptions
    config: Mapping[str, Any]
    """DeepSpeed's configuration, without sizes that depend on the module."""
    precision: ZeROPrecision
    dims: ParallelDims
    ranks_per_node: int


def check_run(options: ZeROOptions, precision: str, device: torch.device) -> None:
    """Check the settings of the Trainer, and that this node has what `options` need. Does not import DeepSpeed.

    Args:
        options: the options of the strategy.
        precision: the value of `Trainer(precision=...)`.
        device: the device of this rank.

    Raises:
        ConfigurationError: a setting contradicts `options`, or a compiler, a library or a folder is missing.
    """
    check_accelerator(device)
    check_precision(precision, device)
    check_users_precision(precision, options.users_config)
    check_offload(options)
