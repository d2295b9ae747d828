"""The loss scale of fp16 autocast: high enough that small gradients survive, lowered when large ones overflow."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_paral.compat.deepspeed.engine import scale_by

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


_FIRST_SCALE = 2.0**16


class DynamicLossScale:
    """A loss scale for DeepSpeed's optimizers that changes like the scale of `torch.amp.GradScaler`.

    If gradients are not finite, the step is skipped and the scale is halved. After 2000 finite steps in a row it is
    doubled. Follows Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.

    DeepSpeed's own loss scale is not used. Under fp16 autocast, version 0.19.8 clips gradients without unscaling them,
    and never lowers the scale. When it raises the scale, it divides gradients by the new scale, although their loss was
    multiplied by the old one.
    """

    dynamic = True

    def __init__(self) -> None:
        self.cur_scale = _FIRST_SCALE
        self._growth_factor = 2.0
        self._backoff_factor = 0.5
        self._growth_interval = 2000
        self._num_finite_steps = 0

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times the scale."""
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Halve the scale if gradients are not finite; else count a finite step.

        DeepSpeed calls this after its check for overflow, and before it divides gradients by the scale. Only `grow` may
        therefore raise the scale.
        """
        if overflow:
            self.cur_scale = max(self.cur_scale * self._backoff_factor, 1.0)
            self._num_finite_steps = 0
        else:
            self._num_finite_steps += 1

    def grow(self) -> None:
        """Double the scale if enough steps were finite. Call this after each step."""
        if self._num_finite_steps >= self._growth_interval:
            self.cur_scale *= self._growth_factor
            self._num_finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which `torch.amp.GradScaler.load_state_dict` accepts as well."""
        return {
            "scale": self.cur_scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_finite_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a loss scale, or of a `torch.amp.GradScaler`."""
        self.cur_scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._num_finite_steps = int(state["_growth_tracker"])


def scale_losses(engine: "DeepSpeedEngine", scale: DynamicLossScale) -> None:
    """Make `engine` use `scale` instead of its own loss scale for fp16 autocast."""
    scale_by(engine.optimizer, scale)
