"""Data-parallel strategies for PyTorch Lightning, selected by name.

import lightning_paral
Trainer(strategy="paral_ddp")
"""

from lightning_paral._version import __version__
from lightning_paral.config import ActivationCheckpointing, CheckpointOptions, Offload
from lightning_paral.data import GatherPredictions
from lightning_paral.errors import (
    CheckpointError,
    ConfigurationError,
    ParalError,
    ProcessGroupError,
    UnusedParametersError,
)
from lightning_paral.namesakes import replace_pytorch_lightning
from lightning_paral.registry import STRATEGIES, register_strategies
from lightning_paral.reported import report_briefly
from lightning_paral.strategies import ParalDDPStrategy, ParalDPStrategy, ParalFSDPStrategy, ParalZeROStrategy

__all__ = [
    "STRATEGIES",
    "ActivationCheckpointing",
    "CheckpointError",
    "CheckpointOptions",
    "ConfigurationError",
    "GatherPredictions",
    "Offload",
    "ParalDDPStrategy",
    "ParalDPStrategy",
    "ParalError",
    "ParalFSDPStrategy",
    "ParalZeROStrategy",
    "ProcessGroupError",
    "UnusedParametersError",
    "__version__",
    "register_strategies",
    "replace_pytorch_lightning",
]

register_strategies()
report_briefly()
