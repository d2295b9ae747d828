"""Precision plugins that average and clip gradients of which this rank has only those of its stage."""

from copy import copy
from typing import Any

from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradients import clip_by_norm, clip_by_value

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")

_PLUGINS = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)


class StageClipping(Precision):
    """Mixin that averages the gradients of one stage, and clips them by the norm of all stages."""

    gradients: StageGradients | None = None
    """During a run, the gradients of this stage."""

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Average the gradients, which `on_after_backward` may then read. *Collective* over the world."""
        if self.gradients is not None:
            self.gradients.finish()
        return super().post_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the total norm of the gradients of all stages. *Collective*."""
        assert self.gradients is not None
        clip_by_norm(self.main_params(optimizer), float(clip_val), self.gradients.norm_of)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each element."""
        clip_by_value(self.main_params(optimizer), float(clip_val))


def stage_precision(plugin: Precision) -> Precision:
    """Return a copy of `plugin` for a pipeline.

    Raises:
        ConfigurationError: a pipeline does not support the precision.
    """
    if isinstance(plugin, StageClipping):
        return plugin
    cls = type(plugin)
    if cls not in _PLUGINS or plugin.precision not in PRECISIONS:
        raise ConfigurationError(
            f"{cls.__name__} (precision={plugin.precision!r}) cannot be used in a pipeline. Set "
            f"Trainer(precision=...) to one of {', '.join(PRECISIONS)}."
        )
    plugin = copy(plugin)
    plugin.__class__ = type(cls.__name__, (StageClipping, cls), {})
    return plugin
