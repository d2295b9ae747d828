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

from lightning_paral.compat.lightning.loops import is_accumulating
from lightning_paral.compat.lightning.strategies import after_closure
from lightning_paral.engines.zero.optimizer import DynamicLossScale, Gradients
from lightning_paral.engines.zero.options import PRECISIONS
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
    """The loss scale in fp16, which the next fit goes on with."""

    def start_fit(self, gradients: Gradients) -> None:
        """Start a fit with `gradients`. In fp16, scale losses from now on, unless the user has set a fixed scale."""
        engine, made = gradients.engine, None
        if self.precision == "16-mixed":
            made = DynamicLossScale()
        elif self.precision == "16-true" and engine.dynamic_loss_scale():
            chosen: Any = engine.dynamic_loss_scale_args()
            made = DynamicLossScale(float(chosen["init_scale"]), int(chosen["scale_window"]))
        self.loss_scale = gradients.loss_scale = None if made is None else self.loss_scale or made
        self.gradients = gradients

    def end_fit(self) -> None:
        """End the fit. The loss scale is kept, because a checkpoint may be saved later."""
        self.gradients = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty if losses are not scaled."""
        return {} if self.loss_scale is None else dict(self.loss_scale.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the loss scale from a checkpoint."""
        if self.loss_scale is not None:
            self.loss_scale.state.update(state_dict)

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
            # Without the cache of weights, as Lightning: a step of manual optimization changes them.
            return torch.autocast(self.device_type, self.dtype, cache_enabled=False)
        return HalfPrecision(self.precision).forward_context() if self.is_low else nullcontext()  # type: ignore[arg-type]

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass, which leaves each rank with its shards of the gradients. *Collective*."""
        if self.gradients is None:  # there is no optimizer, and stage 3 has no memory for gradients that nothing uses
            if not model.automatic_optimization:
                raise ConfigurationError(
                    "manual_backward was called, but configure_optimizers returned None. Under ZeRO gradients are "
                    "sharded for an optimizer: return the optimizer, or train with paral_ddp."
                )
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
