"""The user's optimizer: what DeepSpeed can step with, and its groups outside of steps and in them.

DeepSpeed replaces the parameters in the groups of its optimizer by flat tensors. User code, schedulers and callbacks
would find these in `optimizer.param_groups`. Outside of steps the optimizer therefore has the groups of the user, whose
hyper-parameters are copied to those of DeepSpeed before each step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Adam, AdamW, Optimizer

from lightning_paral.checkpoint.optimizer_state import hyper_parameters, param_names
from lightning_paral.compat.lightning.strategies import is_mock_optimizer
from lightning_paral.compat.torch import optimizers
from lightning_paral.errors import ConfigurationError

_ELEMENTWISE = ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""The optimizers of `torch.optim` that update each element of a parameter by its own gradient and state."""


class UsersOptimizer:
    """The optimizer that `configure_optimizers` returned.

    Args:
        optimizer: the user's optimizer.
        module: the module that contains its parameters, for their names.
        lost: why its states were lost at the end of an earlier run; `None` if they were not.
        on_cpu: whether the optimizer runs on the CPU.

    Raises:
        ConfigurationError: no group has a trained parameter, or the optimizer has states, or had some.
    """

    def __init__(self, optimizer: Optimizer, module: Module, lost: str | None = None, *, on_cpu: bool = False) -> None:
        self.optimizer = optimizer
        self._on_cpu = on_cpu
        self.groups = optimizer.param_groups
        self.names = param_names(optimizer, module)
        self._first_parameters = self._parameter_ids()
        if lost is not None or any(optimizer.state.values()):
            reason = f", and its state was lost: {lost}" if lost else ", from steps or load_state_dict before the run"
            raise ConfigurationError(
                f"{type(optimizer).__name__} already has states{reason}. ZeRO would begin without them. Resume "
                "with trainer.fit(ckpt_path=...), return a new optimizer from configure_optimizers, or train with "
                "paral_ddp."
            )
        # DeepSpeed drops groups without trained parameters, and takes the dtype of gradients from the first parameter.
        trained = [(group, [each for each in group["params"] if each.requires_grad]) for group in self.groups]
        self._pairs = [(group, group | {"params": parameters}) for group, parameters in trained if parameters]
        self.flat_groups = [flat for _, flat in self._pairs]
        """The groups of DeepSpeed, which replaces their parameters by flat tensors."""
        self._flat_state: defaultdict[Tensor, Any] = defaultdict(dict)
        if not self._pairs:
            raise ConfigurationError(
                "No parameter of the optimizer requires a gradient: there is nothing to train. Unfreeze a parameter, "
                "or return None from configure_optimizers."
            )
        self._shown = {"param_groups": self.groups, "state": _HiddenState()}
        self._users_state = optimizer.state
        vars(optimizer).update(self._shown)

    def _parameter_ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]

    @contextmanager
    def flat(self) -> Iterator[Optimizer]:
        """Give the optimizer DeepSpeed's groups and states inside this context."""
        optimizer = self.optimizer
        vars(optimizer).update(param_groups=self.flat_groups, state=self._flat_state)
        try:
            yield optimizer
        finally:
            self.flat_groups, self._flat_state = optimizer.param_groups, optimizer.state
            vars(optimizer).update(self._shown)

    def with_hooks(self, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Return `step(optimizer, closure=closure)`, with the step hooks of the user's optimizer around it."""
        result = optimizers.step_with_hooks(self.optimizer, step, (), {"closure": closure})
        optimizers.mark_stepped(self.optimizer)
        return result

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if user code has changed how the optimizer steps since the run began."""
        if self._parameter_ids() != self._first_parameters:
            raise ConfigurationError(
                "The optimizer got other parameters after the run began. ZeRO shards those that it has then: give all "
                "to the optimizer in configure_optimizers, or train with paral_fsdp or paral_ddp."
            )
        own = vars(self.optimizer)
        if any(own[key] is not shown for key, shown in self._shown.items()):
            raise ConfigurationError(
                "optimizer.state or optimizer.param_groups was replaced during the run, such as by "
                "optimizer.load_state_dict, but under ZeRO the states are sharded. Change groups in place, resume with "
                "trainer.fit(ckpt_path=...), or train with paral_fsdp."
            )
        step_module = getattr(own.get("step", Optimizer.step), "__globals__", {}).get("__name__", "")
        if step_module.partition(".")[0] != "torch":  # whose schedulers wrap it
            raise ConfigurationError(
                "optimizer.step was replaced by another function, which ZeRO would call with flat tensors, several "
                "times or not at all. Use optimizer.register_step_post_hook or on_train_batch_end instead, or train "
                "with paral_fsdp."
            )

    def step(self, run: Callable[[], Any]) -> None:
        """Call `run`, in which DeepSpeed steps, with the current hyper-parameters."""
        for users, flat in self._pairs:
            flat.update(hyper_parameters(users))
            if self._steps_fused(flat):
                flat["fused"] = True
        with optimizers.without_hooks(self.optimizer), self.flat():  # DeepSpeed steps group by group
            run()
        for users, flat in self._pairs:  # some optimizers change hyper-parameters in a step
            users.update(
                {key: value for key, value in hyper_parameters(flat).items() if key in users and key != "fused"}
            )

    def _steps_fused(self, flat: dict[str, Any]) -> bool:
        """Return whether to choose torch's fused kernel, which needs no temporary tensors of the size of the shard."""
        if not self._on_cpu or type(self.optimizer) not in (Adam, AdamW):
            return False
        return flat["fused"] is None and flat["foreach"] is None and not flat["differentiable"]

    def restore(self) -> None:
        """Remove DeepSpeed's state from the optimizer."""
        self.optimizer.state = self._users_state


class _HiddenState(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state` outside of DeepSpeed's steps. Every use is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "optimizer.state was used, as also by optimizer.state_dict(), but under ZeRO each rank has a part of the "
            "states, of flat tensors. Read one with `self.trainer.strategy.full_optimizer_state(parameter, key)`, save "
            "all with trainer.save_checkpoint, or train with paral_fsdp."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse


def check_optimizers(optimizers: list[Any], module: LightningModule, *, trust: bool = False) -> Optimizer | None:
    """Return the user's optimizer if ZeRO can shard it; `None` if `configure_optimizers` returned `None`.

    Args:
        optimizers: what `configure_optimizers` returned.
        module: the module.
        trust: whether to accept an optimizer that is not known to be elementwise.

    Raises:
        ConfigurationError: `configure_optimizers` returned an empty list, several, or what ZeRO cannot shard.
    """
    name = type(module).__name__
    if len(optimizers) == 1 and is_mock_optimizer(optimizers[0]):
        return None
    if not optimizers:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned an empty list. Return an optimizer, or None to run without one."
        )
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed trains with one. Train "
            "with paral_fsdp, which shards the same."
        )
    (optimizer,) = optimizers
    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {type(optimizer).__name__}, which is not a torch.optim.Optimizer. "
            "ZeRO can shard only such an optimizer: return one, or train with paral_ddp."
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "LBFGS needs several backward passes per step, which ZeRO cannot do. Train with paral_ddp."
        )
    if isinstance(optimizer, torch.optim.Adagrad):
        raise ConfigurationError(
            f"DeepSpeed replaces {type(optimizer).__name__} by an Adagrad with default options. Train with paral_fsdp, "
            "which shards the same."
        )
    known = type(optimizer) in (getattr(torch.optim, known) for known in _ELEMENTWISE)
    if not (trust or known or class_name.startswith(("deepspeed.ops.adam.", "deepspeed.ops.lion."))):
        raise ConfigurationError(
            f"{class_name} may not be elementwise. ZeRO gives an optimizer flat tensors that are cut at any element, "
            "so it must update each element by its own gradient and state alone. If it does, as Lion, set "
            "ParalZeROStrategy(trust_optimizer=True). If it computes norms, means or products over parameters, as LAMB "
            f"and Adafactor, train with paral_fsdp or paral_ddp. Known to be elementwise: {', '.join(_ELEMENTWISE)}."
        )
    return optimizer
