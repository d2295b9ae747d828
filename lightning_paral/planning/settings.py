"""The settings of the Trainer on which a plan depends."""

from dataclasses import dataclass

import torch

from lightning_paral.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How the Trainer runs a step.

    Raises:
        ConfigurationError: a value is out of range.
    """

    precision: str = "32-true"
    """As `Trainer(precision=...)`."""
    accumulate: int = 1
    """Micro-batches per optimizer step, as `Trainer(accumulate_grad_batches=...)`."""
    clip_value: float | None = None
    """As `Trainer(gradient_clip_val=...)`."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigurationError(f"accumulate={self.accumulate} has to be at least 1, a number of micro-batches.")

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The dtype to which the parameters are converted; `None` if they keep theirs."""
        return {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(self.precision)

    @property
    def is_mixed(self) -> bool:
        """Whether computation has 16 bits, and parameters have 32."""
        return self.precision in ("bf16-mixed", "16-mixed")
