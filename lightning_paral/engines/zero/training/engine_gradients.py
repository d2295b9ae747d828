"""This rank's shards of averaged gradients: read them in full, clip and drop them, wherever DeepSpeed keeps them."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from lightning_paral.compat.deepspeed import engine as zero_engine
from lightning_paral.compat.deepspeed.engine import (
    clip_next_step,
    discard_offloaded_gradients,
    wait_for_copies,
    zero_gradient_on_host,
)
from lightning_paral.compat.deepspeed.optimizer import is_offloaded
from lightning_paral.engines.zero.training.usage import NamedParameters

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class EngineGradients:
    """The gradients that one engine keeps on this rank: on the device, in host memory or on NVMe.

    They are averaged over the ranks, and multiplied by the loss scale. Read or clip them only when a window of backward
    passes is complete.

    Args:
        engine: the DeepSpeed engine.
    """

    def __init__(self, engine: "DeepSpeedEngine") -> None:
        self._engine = engine
        self.stage: int = engine.zero_optimization_stage()

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer

    @property
    def are_offloaded(self) -> bool:
        """Whether gradients are kept in host memory or on NVMe."""
        return is_offloaded(self._optimizer, self.stage)

    @property
    def _loss_scale(self) -> float:
        return float(self._optimizer.loss_scale)

    def wait(self) -> None:
        """Wait for copies to host memory. Stage 3 does so itself at the end of each backward pass."""
        if self.are_offloaded and self.stage < 3:
            wait_for_copies(self._optimizer)

    def norm(self) -> Tensor:
        """Return the global 2-norm before clipping by norm: a scalar, fp32. *Collective*."""
        return zero_engine.scaled_norm(self._optimizer, self.stage) / self._loss_scale

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the full gradient of `parameter` in fp32; `None` if it has none. *Collective*."""
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return None if gradient is None else gradient.float() / self._loss_scale

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale gradients in the next step so that their global 2-norm is at most `max_norm`. 0 turns this off."""
        clip_next_step(self._optimizer, max_norm)

    def clip_by_value(self, max_value: float) -> None:
        """Clamp each element to `[-max_value, max_value]`. No collective."""
        limit = max_value * self._loss_scale
        zero_engine.clamp_gradients(self._optimizer, self.stage, limit, offloaded=self.are_offloaded)

    def drop(self) -> None:
        """Drop the gradients of the window."""
        self._optimizer.zero_grad()
        if self.stage < 3:
            zero_engine.forget_window(self._optimizer, offloaded=self.are_offloaded)
            if self.are_offloaded:
                discard_offloaded_gradients(self._optimizer)

    def zero_stale(self, unused: NamedParameters) -> None:
        """Zero the gradients of `unused` parameters: stage 3 and offload would keep those of an earlier window."""
        for _, parameter in unused if self.stage < 3 and self.are_offloaded else ():
            zero_gradient_on_host(self._optimizer, parameter)
        for _, parameter in unused if self.stage == 3 else ():
            zero_engine.zero_kept_gradient(self._optimizer, parameter, offloaded=self.are_offloaded)
