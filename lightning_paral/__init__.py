"""Data-parallel strategies for PyTorch Lightning, selected by name.

import lightning_paral
Trainer(strategy="paral_ddp")
"""

import sys

from lightning.pytorch.core import saving

from lightning_paral import tested_versions as tested_versions  # warns of untested versions
from lightning_paral._version import __version__
from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.callbacks.preemption import Preemption
from lightning_paral.checkpoint.load_from_checkpoint import is_folder, read_folder
from lightning_paral.compat.lightning import load_from_checkpoint
from lightning_paral.data import GatherPredictions
from lightning_paral.diagnostics.check import CheckReport, check
from lightning_paral.error_report import install_brief_excepthook
from lightning_paral.errors import (
    CheckpointError,
    ConfigurationError,
    DifferenceError,
    MissingCheckpointError,
    ParalError,
    ProcessGroupError,
    RankFailedError,
    ReferenceFailedError,
    UnusedParametersError,
)
from lightning_paral.options import ActivationCheckpointing, CheckpointOptions, Offload
from lightning_paral.other_trainers import replace_pytorch_lightning
from lightning_paral.planning.plan import Plan, plan
from lightning_paral.registry import STRATEGIES, register_strategies
from lightning_paral.strategies import (
    ParalAutoStrategy,
    ParalDDPStrategy,
    ParalDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)

__all__ = [
    "STRATEGIES",
    "ActivationCheckpointing",
    "AutoResume",
    "CheckReport",
    "CheckpointError",
    "CheckpointOptions",
    "ConfigurationError",
    "DifferenceError",
    "GatherPredictions",
    "MissingCheckpointError",
    "Offload",
    "ParalAutoStrategy",
    "ParalDDPStrategy",
    "ParalDPStrategy",
    "ParalError",
    "ParalFSDPStrategy",
    "ParalMonitor",
    "ParalPipelineStrategy",
    "ParalZeROStrategy",
    "Plan",
    "Preemption",
    "ProcessGroupError",
    "RankFailedError",
    "ReferenceFailedError",
    "UnusedParametersError",
    "__version__",
    "check",
    "plan",
    "register_strategies",
    "replace_pytorch_lightning",
]

register_strategies()
for _saving in filter(None, (saving, sys.modules.get("pytorch_lightning.core.saving"))):
    load_from_checkpoint.install(_saving, is_folder, read_folder)
install_brief_excepthook()
