"""The loss scale of fp16 autocast: high enough that small gradients survive, lowered when large ones overflow."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_paral.compat.deepspeed.loss_scale import scale_by

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


_FIRST_SCALE = 2.0**16


class DynamicLossScale:
    """A loss scale that DeepSpeed's optimizers use, moving as that of `torch.amp.GradScaler` does.

    Halved by a step whose gradients are not finite, which is left out; doubled after 2000 steps without one. Follows
    Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.

    DeepSpeed's own is not used: under fp16 autocast it clips the scaled gradients as if they were not, never lowers
    the scale, and where it raises it, divides gradients by the new scale that were multiplied by the old (0.19.8).
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
        """What losses are multiplied by."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times the scale."""
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step, between its check for overflow and its division by the scale."""
        if overflow:
            self.cur_scale = max(self.cur_scale * self._backoff_factor, 1.0)
            self._num_finite_steps = 0
        else:
            self._num_finite_steps += 1

    def grow(self) -> None:
        """Raise the scale, after a step, if it is time."""
        if self._num_finite_steps >= self._growth_interval:
            self.cur_scale *= self._growth_factor
            self._num_finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.amp.GradScaler.load_state_dict` takes, too."""
        return {
            "scale": self.cur_scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_finite_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the scale, or the `torch.amp.GradScaler`, that `state` was taken of."""
        self.cur_scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._num_finite_steps = int(state["_growth_tracker"])


def scale_losses(engine: "DeepSpeedEngine", scale: DynamicLossScale) -> None:
    """Let `engine` scale losses by `scale`, instead of by what it chose for fp16 autocast."""
    scale_by(engine.optimizer, scale)
