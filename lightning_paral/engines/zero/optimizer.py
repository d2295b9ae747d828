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
from lightning.pytorch.utilities import rank_zero_info
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

    Raises:
        ConfigurationError: no group has a trained parameter, or the optimizer has states, or had some.
    """

    def __init__(self, optimizer: Optimizer, module: Module, lost: str | None = None) -> None:
        self.optimizer = self.stepping_optimizer = optimizer
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
        optimizer = self.stepping_optimizer
        vars(optimizer).update(param_groups=self.flat_groups, state=self._flat_state)
        try:
            yield optimizer
        finally:
            self.flat_groups, self._flat_state = optimizer.param_groups, optimizer.state
            vars(self.optimizer).update(self._shown)

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
            flat.update({key: _like(value, flat.get(key)) for key, value in hyper_parameters(users).items()})
            if self._steps_fused(flat):
                flat["fused"] = True
        with optimizers.without_hooks(self.stepping_optimizer), self.flat():  # DeepSpeed steps group by group
            run()
        for users, flat in self._pairs:  # some optimizers change hyper-parameters in a step
            users.update(
                {key: value for key, value in hyper_parameters(flat).items() if key in users and key != "fused"}
            )

    def _steps_fused(self, flat: dict[str, Any]) -> bool:
        """Return whether to choose torch's fused kernel, which needs no temporary tensors of the size of the shard."""
        from deepspeed.accelerator import get_accelerator

        if type(self.stepping_optimizer) not in (Adam, AdamW) or get_accelerator().device_name() != "cpu":
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


def _like(value: Any, current: Any) -> Any:
    """Return `value`, converted to a float if `current` is one: DeepSpeed's optimizers do not accept tensors."""
    return float(value) if isinstance(current, float) and not isinstance(value, float) else value


def check_optimizers(optimizers: list[Any], module: LightningModule) -> Optimizer | None:
    """Return the user's optimizer if ZeRO can shard it; `None` if `configure_optimizers` returned `None`.

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
    return optimizer


_OFFLOADABLE = (
    "torch.optim.Adam, torch.optim.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam and deepspeed.ops.lion.DeepSpeedCPULion"
)


def choose_stepping_optimizer(users: UsersOptimizer, *, offload: bool, trust: bool) -> None:
    """Set the optimizer that DeepSpeed runs: the user's, or with `offload` the `DeepSpeedCPUAdam` in its place.

    Args:
        users: the user's optimizer.
        offload: whether the optimizer runs on the CPU.
        trust: whether to accept optimizers that are not known to be elementwise.

    Raises:
        ConfigurationError: ZeRO or its offload does not support the optimizer or one of its options.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    users.check_fixed()
    if type(users.optimizer) in (DeepSpeedCPUAdam, DeepSpeedCPULion):
        return
    if offload:
        users.stepping_optimizer = _make_cpu_adam(users.optimizer, users.flat_groups)
    elif not trust:
        _check_elementwise(users.optimizer)


def _check_elementwise(optimizer: Optimizer) -> None:
    if type(optimizer) in (getattr(torch.optim, name) for name in _ELEMENTWISE):
        return
    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    raise ConfigurationError(
        f"{class_name} may not be elementwise. ZeRO gives an optimizer flat tensors that are cut at any element, so it "
        "must update each element by its own gradient and state alone. If it does, as Lion, set "
        "ParalZeROStrategy(trust_optimizer=True). If it computes norms, means or products over parameters, as LAMB and "
        f"Adafactor, train with paral_fsdp or paral_ddp. Known to be elementwise: {', '.join(_ELEMENTWISE)}."
    )


def _make_cpu_adam(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return `DeepSpeedCPUAdam` over `groups` with the hyper-parameters of `optimizer`."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"{class_name} cannot be offloaded. Choose one of {_OFFLOADABLE}, or leave out offload_optimizer."
        )
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(option) for group in groups):
            raise ConfigurationError(
                f"{class_name}({option}=True) cannot be offloaded: DeepSpeedCPUAdam does not have the option. Leave "
                f"out {option} or offload_optimizer."
            )
    decoupled = {_is_decoupled(optimizer, group) for group in groups}
    if len(decoupled) > 1:
        raise ConfigurationError(
            "DeepSpeedCPUAdam decouples the weight decay of all parameter groups (AdamW) or of none (Adam), but "
            "decoupled_weight_decay differs between groups. Give all groups the same value, or leave out "
            "offload_optimizer."
        )
    for group in groups:
        group["lr"] = float(group["lr"])  # torch also accepts tensors
        group["betas"] = tuple(float(beta) for beta in group["betas"])
    replacement: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=decoupled.pop())
    first = groups[0]
    rank_zero_info(
        f"Offload: {class_name} was replaced by DeepSpeedCPUAdam with the same options in all {len(groups)} groups. In "
        f"the first: lr={first['lr']:g}, betas={first['betas']}, eps={first['eps']:g}, "
        f"weight_decay={first['weight_decay']:g}."
    )
    return replacement


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
