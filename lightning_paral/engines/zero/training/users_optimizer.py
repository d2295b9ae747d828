"""The user's optimizer, which keeps the module's own parameters, and its twin, whose `step` DeepSpeed calls.

DeepSpeed replaces the parameters in the groups of its optimizer by flat tensors. User code, schedulers and callbacks
would find these in `optimizer.param_groups`. DeepSpeed therefore gets a twin of the user's optimizer, to which
hyper-parameters are copied before each step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from lightning_paral.checkpoint.optimizer_state import hyper_parameters, param_names
from lightning_paral.compat.deepspeed.runtime import cache_cpu_info
from lightning_paral.compat.lightning.strategies import is_mock_optimizer
from lightning_paral.compat.torch import optimizers
from lightning_paral.engines.zero.runtime.operators import load_operator
from lightning_paral.engines.zero.training.step_in_pieces import can_step_in_pieces, step_in_pieces
from lightning_paral.errors import ConfigurationError, ParalError

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""The optimizers of `torch.optim` that update each element of a parameter by its own gradient and state."""


def make_twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer with the class and attributes of `optimizer`, the parameter `groups` and an empty state."""
    twin: Optimizer = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}  # wrapped by schedulers
    twin.__dict__.update(attributes, param_groups=groups, state=defaultdict(dict))
    twin.__dict__.update(optimizers.no_hooks())
    return twin


class UsersOptimizer:
    """An optimizer that `configure_optimizers` returned, and whose twin takes the steps.

    Args:
        optimizer: the user's optimizer.
        module: the module that contains its parameters, for their names.
    """

    def __init__(self, optimizer: Optimizer, module: Module) -> None:
        self.optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        self.names = param_names(optimizer, module)
        self._state = optimizer.state
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def trained_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups with trained parameters, for the twin. DeepSpeed would drop other groups.

        Raises:
            ConfigurationError: no group has a trained parameter.
        """
        self._pairs = [
            (group, group | {"params": list(group["params"])})
            for group in self.groups
            if any(parameter.requires_grad for parameter in group["params"])
        ]
        if not self._pairs:
            raise ConfigurationError(
                "No parameter of the optimizer requires a gradient: there is nothing to train. Unfreeze a parameter, "
                "or return None from configure_optimizers."
            )
        return [twins for _, twins in self._pairs]

    def hide_state(self, zero_grad: Callable[..., None], sharded: Mapping[Any, dict[str, Any]]) -> None:
        """Replace the state by one that raises when it is used, and the method `zero_grad` by the given function.

        `sharded` is the state of the twin, from which the error takes the name of a state.
        """
        vars(self.optimizer).update(state=HiddenState(sharded), zero_grad=zero_grad)

    def show_state(self) -> None:
        """Undo `hide_state`."""
        vars(self.optimizer).update(state=self._state)
        vars(self.optimizer).pop("zero_grad", None)

    def before_step(self) -> None:
        """Run the user's pre-step hooks, and copy hyper-parameters to the twin.

        Raises:
            ConfigurationError: a group was added after the run began.
        """
        if len(self.optimizer.param_groups) != len(self.groups):
            raise ConfigurationError(
                f"The optimizer had {len(self.groups)} parameter groups when the run began, and has "
                f"{len(self.optimizer.param_groups)} now. ZeRO shards the groups that exist when the run begins: give "
                "all groups to the optimizer in configure_optimizers, or train with paral_ddp or paral_fsdp."
            )
        optimizers.run_pre_hooks(self.optimizer)
        for users, twins in self._pairs:
            twins.update({key: _like(value, twins.get(key)) for key, value in hyper_parameters(users).items()})

    def after_step(self) -> None:
        """Copy back hyper-parameters, which some optimizers change in a step, and run the user's post-step hooks."""
        for users, twins in self._pairs:
            users.update({key: value for key, value in hyper_parameters(twins).items() if key in users})
        optimizers.mark_stepped(self.optimizer)
        optimizers.run_post_hooks(self.optimizer)


def _like(value: Any, current: Any) -> Any:
    """Return `value`, converted to a float if `current` is one: DeepSpeed's optimizers do not accept tensors."""
    return float(value) if isinstance(current, float) and not isinstance(value, float) else value


_OFFLOADABLE = (
    "torch.optim.Adam, torch.optim.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam and deepspeed.ops.lion.DeepSpeedCPULion"
)


def check_optimizers(optimizers: list[Any], module: LightningModule) -> list[Optimizer] | None:
    """Return the user's `optimizers` if ZeRO can shard each; `None` if `configure_optimizers` returned `None`.

    Raises:
        ConfigurationError: `configure_optimizers` returned an empty list, or an optimizer that ZeRO cannot shard.
    """
    name = type(module).__name__
    if len(optimizers) == 1 and is_mock_optimizer(optimizers[0]):
        return None
    if not optimizers:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned an empty list. Return an optimizer, or None to run without one."
        )
    others = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]
    if others:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {others[0]}, which is not a torch.optim.Optimizer. "
            "ZeRO can shard only such an optimizer: return one, or train with paral_ddp."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigurationError(
            "LBFGS needs several backward passes per step, which ZeRO cannot do. Train with paral_ddp."
        )
    return optimizers


def optimizer_index(optimizer: Any, optimizers: Sequence[Any]) -> int:
    """Return the index of `optimizer`, which Lightning may have wrapped, in the user's `optimizers`.

    Raises:
        ConfigurationError: it is not one of them.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for number, each in enumerate(optimizers):
        if each is optimizer:
            return number
    raise ConfigurationError(
        f"This {type(optimizer).__name__} is not one of the {len(optimizers)} optimizers that configure_optimizers "
        "returned. Use those that self.optimizers() returns."
    )


def make_engine_optimizer(users: UsersOptimizer, *, offload: bool, trust: bool) -> Optimizer:
    """Return the twin for DeepSpeed. It shares only parameters with the user's optimizer.

    Args:
        users: the user's optimizer.
        offload: whether the twin runs on the CPU. `DeepSpeedCPUAdam` then replaces torch's Adam and AdamW.
        trust: whether to accept optimizers that are not known to be elementwise.

    Raises:
        ConfigurationError: ZeRO or its offload does not support the optimizer or one of its options, or the optimizer
            has no trained parameter.
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
        return _make_cpu_adam(optimizer, users.trained_groups())
    if not trust:
        _check_elementwise(optimizer)
    twin = make_twin(optimizer, users.trained_groups())
    if can_step_in_pieces(optimizer) and next(iter(users.groups[0]["params"])).device.type == "cpu":
        step_in_pieces(twin)
    return twin


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
    load_operator("cpu_adam", "offload_optimizer")
    with cache_cpu_info():
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


class HiddenStateError(ParalError, RuntimeError):
    """User code accessed `optimizer.state`, which does not contain the sharded state under ZeRO."""


class HiddenState(MutableMapping[Any, Any]):
    """Replaces `optimizer.state`, and raises when it is used."""

    def __init__(self, sharded: Mapping[Any, dict[str, Any]]) -> None:
        self._sharded = sharded

    def _refuse(self, *_: Any) -> NoReturn:
        keys = [f'"{k}"' for each in self._sharded.values() for k, v in each.items() if torch.is_tensor(v) and v.dim()]
        raise HiddenStateError(
            "optimizer.state was accessed, but under ZeRO it does not contain the state, which is sharded. Read it "
            f"with `self.trainer.strategy.full_optimizer_state(parameter, {keys[0] if keys else 'key'})`; checkpoints "
            "contain all of it. To reset or change it, train with paral_ddp or paral_fsdp."
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
