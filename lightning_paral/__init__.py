"""Data-parallel strategies for PyTorch Lightning, selected by name.

import lightning_paral
Trainer(strategy="paral_ddp")
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_paral import tested_versions as tested_versions  # warns of untested versions
from lightning_paral._version import __version__
from lightning_paral.checkpoint import is_folder, read_folder
from lightning_paral.compat.lightning.loops import let_load_read_folders
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
from lightning_paral.registry import STRATEGIES, register_strategies

if TYPE_CHECKING:  # the names of `_IMPORTED_WHEN_USED`, for type checkers and editors
    from lightning_paral.callbacks.auto_resume import AutoResume
    from lightning_paral.callbacks.monitor import ParalMonitor
    from lightning_paral.callbacks.preemption import Preemption
    from lightning_paral.data import GatherPredictions
    from lightning_paral.diagnostics.check import CheckReport, check
    from lightning_paral.planning.plan import Plan, plan
    from lightning_paral.strategies.auto import ParalAutoStrategy
    from lightning_paral.strategies.ddp import ParalDDPStrategy
    from lightning_paral.strategies.dp import ParalDPStrategy
    from lightning_paral.strategies.fsdp import ParalFSDPStrategy
    from lightning_paral.strategies.local_sgd import ParalLocalSGDStrategy
    from lightning_paral.strategies.pipeline import ParalPipelineStrategy
    from lightning_paral.strategies.zero import ParalZeROStrategy

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
    "ParalLocalSGDStrategy",
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
]

_IMPORTED_WHEN_USED = {
    "AutoResume": "lightning_paral.callbacks.auto_resume",
    "CheckReport": "lightning_paral.diagnostics.check",
    "GatherPredictions": "lightning_paral.data",
    "ParalMonitor": "lightning_paral.callbacks.monitor",
    "Plan": "lightning_paral.planning.plan",
    "Preemption": "lightning_paral.callbacks.preemption",
    "check": "lightning_paral.diagnostics.check",
    "plan": "lightning_paral.planning.plan",
    **{entry.class_name: entry.module for entry in STRATEGIES},
}
"""The modules of the names that `import lightning_paral` does not load."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
let_load_read_folders(is_folder, read_folder)
install_brief_excepthook()
