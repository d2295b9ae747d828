"""The user's optimizer, which keeps the module's own parameters, and its twin, which DeepSpeed steps with.

DeepSpeed puts its own flat tensors into the groups of the optimizer it is given. User code, schedulers and callbacks
would find those in `optimizer.param_groups`. So DeepSpeed gets a twin, and hyper-parameters are copied to the twin
before each step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from lightning_paral.checkpoint.state.optimizer import hyper_parameters, param_names
from lightning_paral.compat.deepspeed.processor import cache_cpu_info
from lightning_paral.compat.lightning.optimizers import is_mock_optimizer
from lightning_paral.compat.torch import step_hooks
from lightning_paral.engines.zero.runtime.operators import load_operator
from lightning_paral.engines.zero.training.elementwise import check_elementwise
from lightning_paral.errors import ConfigurationError, ParalError


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and options, with `groups` as its groups and an empty state."""
    twin: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # schedulers wrap that
    twin.__dict__.update(own, param_groups=groups, state=defaultdict(dict))
    twin.__dict__.update(step_hooks.no_hooks())
    return twin


class UsersOptimizer:
    """An optimizer that `configure_optimizers` returned, while a twin of it steps.

    Args:
        optimizer: the user's.
        module: the module; names its parameters.
    """

    def __init__(self, optimizer: Optimizer, module: Module) -> None:
        self.optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        self.names = param_names(optimizer, module)
        self._state = optimizer.state
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def trained_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups that train a parameter, for the twin: DeepSpeed would drop the others.

        Raises:
            ConfigurationError: there are none.
        """
        self._pairs = [
            (group, group | {"params": list(group["params"])})
            for group in self.groups
            if any(parameter.requires_grad for parameter in group["params"])
        ]
        if not self._pairs:
            raise ConfigurationError("No parameter of the optimizer requires a gradient: there is nothing to train.")
        return [twins for _, twins in self._pairs]

    def hide_state(self, zero_grad: Callable[..., None]) -> None:
        """Replace the state by one that raises when used, and `zero_grad` by the given function."""
        vars(self.optimizer).update(state=HiddenState(), zero_grad=zero_grad)

    def show_state(self) -> None:
        """Undo `hide_state`."""
        vars(self.optimizer).update(state=self._state)
        vars(self.optimizer).pop("zero_grad", None)

    def before_step(self) -> None:
        """Run the user's hooks, and copy the user's hyper-parameters to the twin.

        Raises:
            ConfigurationError: a group was added since the run began.
        """
        if len(self.optimizer.param_groups) != len(self.groups):
            raise ConfigurationError(
                f"The optimizer had {len(self.groups)} parameter groups when the run began, and has "
                f"{len(self.optimizer.param_groups)} now. ZeRO shards the groups that are there then: give all groups "
                "to the optimizer in configure_optimizers, or train with paral_ddp or paral_fsdp."
            )
        step_hooks.run_pre_hooks(self.optimizer)
        for users, twins in self._pairs:
            twins.update({key: _like(value, twins.get(key)) for key, value in hyper_parameters(users).items()})

    def after_step(self) -> None:
        """Copy what the twin changed in its groups, where some optimizers keep numbers, and run the user's hooks."""
        for users, twins in self._pairs:
            users.update({key: value for key, value in hyper_parameters(twins).items() if key in users})
        step_hooks.mark_stepped(self.optimizer)
        step_hooks.run_post_hooks(self.optimizer)


def _like(value: Any, current: Any) -> Any:
    """Return `value`, as a float where `current` is one: DeepSpeed's optimizers take no tensors."""
    return float(value) if isinstance(current, float) and not isinstance(value, float) else value


_OFFLOADABLE = (
    "torch.optim.Adam, torch.optim.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam and deepspeed.ops.lion.DeepSpeedCPULion"
)


def check_kind(optimizers: list[Any], module: LightningModule) -> list[Optimizer] | None:
    """Check the kinds of the optimizers; return `None` if `configure_optimizers` returned `None`, else all of them.

    Raises:
        ConfigurationError: `configure_optimizers` returned an empty list, or an optimizer that ZeRO cannot partition.
    """
    name = type(module).__name__
    if len(optimizers) == 1 and is_mock_optimizer(optimizers[0]):
        return None
    if not optimizers:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned a list without an optimizer. Return an optimizer, or None to run "
            "without one."
        )
    others = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]
    if others:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {others[0]}, which is not a torch.optim.Optimizer. "
            "ZeRO shards the state of one: return one, or train with paral_ddp."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigurationError("LBFGS needs several backward passes per step, which ZeRO cannot do.")
    return optimizers


def index_of(optimizer: Any, optimizers: Sequence[Any]) -> int:
    """Return the index of `optimizer` among the user's `optimizers`; Lightning may have wrapped it.

    Raises:
        ConfigurationError: it is none of them.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for number, each in enumerate(optimizers):
        if each is optimizer:
            return number
    raise ConfigurationError(
        f"{type(optimizer).__name__} is none of the {len(optimizers)} optimizers that configure_optimizers returned. "
        "Use those of self.optimizers()."
    )


def engines_optimizer(users: UsersOptimizer, *, offload: bool, trust: bool) -> Optimizer:
    """Return the twin that DeepSpeed gets, which shares only parameters with the user's optimizer.

    Args:
        users: the user's.
        offload: whether it runs on the host: then it is `DeepSpeedCPUAdam` with the hyper-parameters of an Adam.
        trust: whether to skip the check that the optimizer is elementwise.

    Raises:
        ConfigurationError: an optimizer, or an option of it, that ZeRO or its offload cannot take; nothing to train.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    optimizer: Any = users.optimizer
    if type(optimizer) in (DeepSpeedCPUAdam, DeepSpeedCPULion):
        options = {"fp32_optimizer_states": optimizer.fp32_optimizer_states}
        if type(optimizer) is DeepSpeedCPUAdam:
            options["adamw_mode"] = optimizer.adam_w_mode
        with cache_cpu_info():
            twin: Optimizer = type(optimizer)(users.trained_groups(), **options)
        return twin
    if offload:
        return _offloaded(optimizer, users.trained_groups())
    if not trust:
        check_elementwise(optimizer)
    return twin_of(optimizer, users.trained_groups())


def _offloaded(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return `DeepSpeedCPUAdam` over `groups` with the hyper-parameters of `optimizer`."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"{kind} cannot be offloaded. Those that can: {_OFFLOADABLE}. Choose one of them, or leave out "
            "offload_optimizer."
        )
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(option) for group in groups):
            raise ConfigurationError(f"{kind}({option}=True) cannot be offloaded: DeepSpeedCPUAdam has no {option}.")
    decoupled = {_is_decoupled(optimizer, group) for group in groups}
    if len(decoupled) > 1:
        raise ConfigurationError(
            "DeepSpeedCPUAdam decouples the weight decay of all parameter groups (AdamW) or of none (Adam), but "
            "decoupled_weight_decay differs between groups."
        )
    for group in groups:
        group["lr"] = float(group["lr"])  # torch takes tensors, too
        group["betas"] = tuple(float(beta) for beta in group["betas"])
    load_operator("cpu_adam", "offload_optimizer")
    with cache_cpu_info():
        replacement: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=decoupled.pop())
    first, *others = groups
    rank_zero_info(
        f"Offload: {kind} was replaced by DeepSpeedCPUAdam with the same lr={first['lr']:g}, betas={first['betas']}, "
        f"eps={first['eps']:g}, weight_decay={first['weight_decay']:g}, {len(others)} further groups likewise."
    )
    return replacement


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


class HiddenStateError(ParalError, RuntimeError):
    """User code used `optimizer.state`, which is sharded and kept elsewhere under ZeRO."""


class HiddenState(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state`, and raises when it is used."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise HiddenStateError(
            "The state of the optimizer was used, but under ZeRO it is sharded, and not in optimizer.state. "
            'Read it with `self.trainer.strategy.full_optimizer_state(parameter, "exp_avg")`; checkpoints hold all of '
            "it. To reset or change it, train with paral_ddp or paral_fsdp."
        )

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Any) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()
