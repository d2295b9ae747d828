"""Precision under ZeRO: autocast over fp32 weights, or low-precision weights. Also runs backward passes and steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.deepspeed.optimizer import scale_by
from lightning_paral.compat.lightning.loops import is_accumulating
from lightning_paral.compat.lightning.strategies import after_closure
from lightning_paral.engines.zero.gradients import Gradients
from lightning_paral.engines.zero.options import PRECISIONS
from lightning_paral.errors import ConfigurationError

_DTYPES = {"16": torch.float16, "bf": torch.bfloat16, "32": torch.float32}


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


class ZeROPrecision(DeepSpeedPrecision):
    """Implements `Trainer(precision=...)` with the same meaning as under other strategies.

    Mixed precision is autocast, which leaves weights and inputs in fp32. Lightning's `DeepSpeedPrecision` casts them.
    """

    device_type = "cpu"
    gradients: Gradients | None = None
    """The gradients of the current fit; `None` outside of a fit, and in a fit without an optimizer."""
    loss_scale: DynamicLossScale | None = None
    """The loss scale of the last fit, under fp16 autocast."""

    def start_fit(self, gradients: Gradients) -> None:
        """Start a fit with `gradients`. Under fp16 autocast, scale losses from now on."""
        self.loss_scale = None
        if self.precision == "16-mixed":
            self.loss_scale = DynamicLossScale()
            scale_by(gradients.engine.optimizer, self.loss_scale)
        self.gradients = gradients

    def end_fit(self) -> None:
        """End the fit. The loss scale is kept, because a checkpoint may be saved later."""
        self.gradients = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty if losses are not scaled."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the loss scale from a checkpoint."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; under autocast, the dtype of the operations that autocast casts."""
        return _DTYPES[self.precision[:2]]

    @property
    def is_low(self) -> bool:
        """Whether weights are bf16 or fp16."""
        return not self.is_mixed and self.dtype != torch.float32

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.precision.endswith("-mixed")

    def convert_module(self, module: Module) -> Module:
        """Cast parameters and buffers if weights are in low precision; else return `module` unchanged."""
        return module.to(dtype=self.dtype) if self.is_low else module

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs if weights are in low precision; else return `data` unchanged."""
        return HalfPrecision(self.precision).convert_input(data) if self.is_low else data  # type: ignore[arg-type]

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context for steps: autocast, or the dtype of the weights as default dtype."""
        if self.is_mixed:
            return torch.autocast(self.device_type, self.dtype)
        return HalfPrecision(self.precision).forward_context() if self.is_low else nullcontext()  # type: ignore[arg-type]

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass, which leaves each rank with its shards of the gradients. *Collective*."""
        if self.gradients is None:
            self._skip_backward(model)
            return
        engine = self.gradients.engine
        self.gradients.before_backward(ends_window=model.automatic_optimization and not is_accumulating(model.trainer))
        if is_overridden("backward", model):
            is_scaled = self.precision.startswith("16")
            model.backward(engine.scale(tensor) if is_scaled else tensor, *args, **kwargs)
        elif args or kwargs.keys() - {"retain_graph"}:
            raise ConfigurationError(
                "manual_backward got other arguments than the loss and retain_graph, which DeepSpeed does not take. "
                "Change the loss instead, such as (loss * gradient).sum(), or train with paral_fsdp."
            )
        else:
            engine.backward(tensor, scale_wrt_gas=False, **kwargs)
        self.gradients.after_backward()

    def _skip_backward(self, model: LightningModule) -> None:
        # There is no optimizer: nothing would use the gradients, and stage 3 has no memory for them.
        if not model.automatic_optimization:
            raise ConfigurationError(
                "manual_backward was called, but configure_optimizers returned None. Under ZeRO gradients are sharded "
                "for an optimizer, and are not in parameter.grad: return the optimizer, or train with paral_ddp."
            )

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run `closure`, then Lightning's hooks, then the step of the sharded optimizer. *Collective*.

        Raises:
            ConfigurationError: see `Gradients.step`; or the step got arguments, which DeepSpeed does not pass on.
        """
        if kwargs:
            raise ConfigurationError(
                f"optimizer.step got {', '.join(kwargs)}. DeepSpeed passes no arguments to the optimizer. Leave them "
                "out, or train with paral_fsdp."
            )

        def run() -> Any:
            result = closure()
            if self.gradients is not None:
                self.gradients.end_window()
            after_closure(self, model, optimizer)
            return result

        if self.gradients is None:
            return run()
        if self.loss_scale is None:
            return self.gradients.step(run)
        result = run()  # torch's GradScaler steps after it, with the hooks of the optimizer
        self.gradients.step(lambda: None)
        self.loss_scale.grow()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the global norm in the next step.

        Raises:
            ConfigurationError: `gradient_clip_algorithm` is `"value"`, which DeepSpeed does not have.
        """
        if clip_val is None or clip_val <= 0 or self.gradients is None:
            return
        check_clipping(gradient_clip_algorithm)
        self.gradients.clip_by_norm(float(clip_val))


def check_clipping(algorithm: str | None) -> None:
    """Raise a `ConfigurationError` for clipping by value, which DeepSpeed does not have."""
    if algorithm == GradClipAlgorithmType.VALUE:
        raise ConfigurationError(
            'DeepSpeed does not clip gradients by value. Use gradient_clip_algorithm="norm", or train with paral_fsdp.'
        )


def as_zero_precision(plugin: Precision) -> ZeROPrecision:
    """Return `plugin`, or the `ZeROPrecision` that replaces Lightning's `DeepSpeedPrecision`.

    The Trainer creates a `DeepSpeedPrecision` for every `DeepSpeedStrategy`.

    Raises:
        ConfigurationError: it is another plugin.
    """
    if type(plugin) is DeepSpeedPrecision:
        return ZeROPrecision(plugin.precision)  # type: ignore[arg-type]
    if not isinstance(plugin, ZeROPrecision):
        raise ConfigurationError(
            f"{type(plugin).__name__} cannot be used under ZeRO. Leave it out, and set Trainer(precision=...) to one "
            f"of {', '.join(PRECISIONS)}."
        )
    return plugin
