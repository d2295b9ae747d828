"""The options of `ParalMonitor`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_paral.errors import ConfigurationError

OWNER = "ParalMonitor"


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """The options of `ParalMonitor`.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    every_n_steps: int = 50
    """After how many training batches to report."""

    tokens_per_sample: int | Callable[[Any], int] | None = None
    """The number of tokens of each sample, or a function that returns the number of tokens of a batch."""

    flops_per_step: float | None = None
    """Floating-point operations of this rank in the forward and backward pass of one batch."""

    peak_flops: float | None = None
    """Floating-point operations per second that the device of a rank can do."""

    planned_bytes: int | None = None
    """Bytes per rank that were planned, shown beside the measured peak."""

    plan: bool = False
    """Whether to plan the fit when it begins, and to show the plan beside what is measured."""

    show_in_progress_bar: bool = True
    """Whether the progress bar shows the step time, the rate and the slow rank."""

    print_summary: bool = True
    """Whether rank 0 prints a table at the end of the fit."""

    def __post_init__(self) -> None:
        positive = ("every_n_steps", "tokens_per_sample", "flops_per_step", "peak_flops", "planned_bytes")
        for name in positive:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ConfigurationError(f"{OWNER}({name}={value!r}): {name} has to be larger than 0, and finite.")
        if self.plan and self.planned_bytes is not None:
            raise ConfigurationError(
                f"{OWNER}(plan=True, planned_bytes={self.planned_bytes}): plan=True computes the bytes. Leave one of "
                "them out."
            )
        if (self.flops_per_step is None) != (self.peak_flops is None):
            given, missing = (
                ("flops_per_step", "peak_flops") if self.peak_flops is None else ("peak_flops", "flops_per_step")
            )
            raise ConfigurationError(
                f"{OWNER}({given}={getattr(self, given)!r}) has no {missing}: the share of the peak that is used "
                f"(MFU) needs both. Give {missing} as well, or neither."
            )
