"""A module, its optimizers and a Trainer whose tensors have no memory, to follow steps without computing them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_paral.compat.lightning.strategies import set_device_everywhere
from lightning_paral.compat.torch.modules import own_buffers, own_parameters
from lightning_paral.compat.torch.tensors import fake_tensor_mode
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


class PlanningTrainer(Trainer):
    """A Trainer on the CPU without logger, callbacks and data."""

    estimated_stepping_batches = 1000
    """A number for learning rate schedules, which do not change what a step allocates."""

    def __init__(self, settings: StepSettings) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        options: dict[str, Any] = {"precision": settings.precision}  # Lightning checks it
        options |= dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        super().__init__(accelerator="cpu", devices=1, **options)


class FakeModule:
    """A module on tensors without memory, and its optimizers.

    The module cannot be used for anything else afterwards, so create this in a process of its own: see `run_isolated`.

    Args:
        module: its parameters may be on any device, including meta.
        settings: the Trainer's settings.
        datamodule: what `trainer.datamodule` is in the module's hooks.
        is_set_up: whether `setup("fit")` has been called.

    Raises:
        ConfigurationError: the shape of a parameter is not known.
    """

    def __init__(
        self, module: LightningModule, settings: StepSettings, datamodule: Any = None, *, is_set_up: bool = False
    ) -> None:
        self.module, self.settings = module, settings
        self.trainer = PlanningTrainer(settings)
        _attach(module, self.trainer, datamodule)
        if not is_set_up:
            module.setup("fit")
        self.early_bytes = sum(each.nbytes for each in module.parameters() if not is_lazy(each))
        with torch.device("meta"):
            module.configure_model()
        if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
            raise ConfigurationError(
                f"The shape of {lazy[0]} is not known before the first forward pass, so its memory cannot be planned. "
                "Give the layer its number of inputs, for example nn.Linear in place of nn.LazyLinear."
            )
        self.mode = fake_tensor_mode()
        with self.mode:
            _become_fake(module, self.mode, settings.parameter_dtype)
            module.train()
        set_device_everywhere(module, torch.device("cpu"))  # `self.device` of a module that was built on meta
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        with self.mode:
            configured = module.configure_optimizers()
        # In a list that holds a list, tuple or dict of them.
        apply_to_collection(configured, Optimizer, self.optimizers.append)
        apply_to_collection(configured, LRScheduler, self.schedulers.append)

    def use_optimizers(self, backward: Callable[..., Any]) -> None:
        """Make the methods for manual optimization use the optimizers, and `backward` for the backward pass."""

        def one_or_all(found: list[Any]) -> Any:
            """Return what Lightning's methods of the same purpose do."""
            return (found[0] if len(found) == 1 else found) if found else None

        self.trainer.strategy.optimizers = self.optimizers
        object.__setattr__(self.module, "optimizers", lambda *_, **__: one_or_all(self.optimizers))
        object.__setattr__(self.module, "lr_schedulers", lambda: one_or_all(self.schedulers))
        object.__setattr__(self.module, "manual_backward", backward)

    def converted(self, batch: Any) -> Any:
        """Return the batch as a step gets it, without values."""
        batch = apply_to_collection(batch, Tensor, lambda tensor: fake_of(tensor.detach(), self.mode))
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.on_after_batch_transfer(batch, 0)
        return self.trainer.precision_plugin.convert_input(batch)


def fake_of(tensor: Tensor, mode: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake tensor on the CPU with the same shape and strides, and for floating-point values with `dtype`."""
    with mode:
        kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        if tensor.layout is not torch.strided:  # counted as dense
            return torch.empty(tensor.shape, dtype=kind, device="cpu")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")


def call_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call a step as Lightning does: it may or may not take the number of the batch."""
    return step(batch, *([0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []))


def _attach(module: LightningModule, trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Give `module` the trainer, and replace its methods that need a running fit."""
    module.trainer = trainer
    trainer.strategy.connect(module)
    vars(trainer)["datamodule"] = datamodule
    trainer.loggers = [DummyLogger()]  # accepts any call, also of its `experiment`
    for name in ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"):
        object.__setattr__(module, name, lambda *_, **__: None)
    object.__setattr__(module, "all_gather", lambda data, *_, **__: data)


def _become_fake(module: Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Replace the parameters, buffers and tensor attributes of `module` by fake ones; tied ones stay tied."""
    memo: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that no id is used twice

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            made = fake_of(tensor.detach(), mode, dtype)
            if isinstance(tensor, Parameter):
                made = Parameter(made, requires_grad=tensor.requires_grad)
                vars(made).update(vars(tensor))
            memo[id(tensor)] = tensor, made
        return memo[id(tensor)][1]

    for part in module.modules():
        own: tuple[dict[str, Any], ...] = (own_parameters(part), own_buffers(part), vars(part))
        for tensors in own:
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = fake(value)
