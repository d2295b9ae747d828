"""Data-parallel strategies for PyTorch Lightning, selected by name.

import lightning_paral
Trainer(strategy="paral_ddp")
"""

from lightning_paral._version import __version__
from lightning_paral.config import Checkpointing, Offload
from lightning_paral.errors import (
    CheckpointError,
    ConfigurationError,
    ParalError,
    ProcessGroupError,
    UnusedParametersError,
)
from lightning_paral.registry import STRATEGIES, register_strategies
from lightning_paral.strategies import ParalDDPStrategy, ParalZeROStrategy

__all__ = [
    "STRATEGIES",
    "CheckpointError",
    "Checkpointing",
    "ConfigurationError",
    "Offload",
    "ParalDDPStrategy",
    "ParalError",
    "ParalZeROStrategy",
    "ProcessGroupError",
    "UnusedParametersError",
    "__version__",
    "register_strategies",
]

register_strategies()
