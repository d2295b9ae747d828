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
from torch.optim import LBFGS, Optimizer

from lightning_paral.compat.lightning.loops import is_accumulating
from lightning_paral.compat.lightning.strategies import after_closure
from lightning_paral.engines.zero.runtime.config import PRECISIONS
from lightning_paral.engines.zero.training.joint_gradients import Gradients, JointGradients
from lightning_paral.engines.zero.training.loss_scale import DynamicLossScale, scale_losses
from lightning_paral.errors import ConfigurationError

_DTYPES = {"16": torch.float16, "bf": torch.bfloat16, "32": torch.float32}


class ZeROPrecision(DeepSpeedPrecision):
    """Implements `Trainer(precision=...)` with the same meaning as under other strategies.

    Mixed precision is autocast, which leaves weights and inputs in fp32. Lightning's `DeepSpeedPrecision` casts them.
    """

    device_type = "cpu"
    gradients: Gradients | None = None
    """The gradients of the current fit; `None` outside of a fit, and in a fit without an optimizer."""
    loss_scale: DynamicLossScale | None = None
    """The loss scale of the last fit, under fp16 autocast."""

    def start_fit(self, gradients: Gradients) -> Gradients:
        """Start a fit with `gradients`, and return them. Under fp16 autocast, scale losses from now on."""
        self.loss_scale = None
        if self.precision == "16-mixed":
            self.loss_scale = DynamicLossScale()
            for engine_gradients in gradients.per_optimizer:
                scale_losses(engine_gradients.engine, self.loss_scale)
        self.gradients = gradients
        return gradients

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
        if isinstance(self.gradients, JointGradients):
            self.gradients.backward(tensor, lambda loss: model.backward(loss, *args, **kwargs))
            return
        engine = self.gradients.engine
        automatic = model.automatic_optimization
        self.gradients.before_backward(
            ends_window=automatic and not is_accumulating(model.trainer), by_hand=not automatic
        )
        if is_overridden("backward", model):
            needs_scale = engine.optimizer.needs_scaler()
            model.backward(engine.scale(tensor) if needs_scale else tensor, *args, **kwargs)
            self.gradients.undo_empty_pass()
        else:
            engine.backward(tensor, *args, scale_wrt_gas=False, **kwargs)
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
        """Run `closure`, then the hooks, then the step of the sharded optimizer. *Collective*.

        Raises:
            ConfigurationError: the optimizer is LBFGS; see also `PartitionedGradients.step`.
            UnusedParametersError: see `Usage.close_window`.
        """
        if isinstance(getattr(optimizer, "optimizer", optimizer), LBFGS):
            raise ConfigurationError(
                "LBFGS needs several backward passes per step, which ZeRO cannot do. Train with paral_ddp."
            )
        closure_result = closure()
        if self.gradients is None:
            after_closure(self, model, optimizer)
            return closure_result
        gradients = self.gradients.of(optimizer)
        gradients.end_window()
        after_closure(self, model, optimizer)
        gradients.step(closure_result, kwargs)
        if self.loss_scale is not None:
            self.loss_scale.grow()
        return closure_result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by value now, or by the global norm in the next step. *Collective*."""
        if clip_val is None or clip_val <= 0 or self.gradients is None:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.gradients.of(optimizer).clip_by_value(float(clip_val))
        else:
            self.gradients.of(optimizer).clip_by_norm(float(clip_val))


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
