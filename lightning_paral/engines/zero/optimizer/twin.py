"""Two optimizers: the user's, with the module's own parameters, and the one whose parameters DeepSpeed divides.

DeepSpeed puts flat tensors of its own into the groups of the optimizer it is given. Code of the user's would find those
in `optimizer.param_groups`, and schedulers and callbacks with it. So DeepSpeed gets a twin, and before each step the
twin's groups are told what the user's say.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.checkpoint.state.optimizer import hyper_parameters, param_names
from lightning_paral.compat.torch import step_hooks
from lightning_paral.engines.zero.gradients.hidden import HiddenState
from lightning_paral.errors import ConfigurationError


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and options, with `groups` and a state of its own."""
    twin: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # schedulers wrap that
    twin.__dict__.update(own, param_groups=groups, state=defaultdict(dict))
    twin.__dict__.update(step_hooks.no_hooks())
    return twin


class UsersOptimizer:
    """The optimizer that `configure_optimizers` returned, while its twin is the one that steps.

    Args:
        optimizer: the user's.
        module: whose parameters it has.
    """

    def __init__(self, optimizer: Optimizer, module: Module) -> None:
        self.optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        self.names = param_names(optimizer, module)
        self._state = optimizer.state
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def busy_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups in which a parameter is trained: DeepSpeed drops the others.

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
        """Let what is DeepSpeed's now be asked of DeepSpeed: the state raises, `zero_grad` is its own."""
        vars(self.optimizer).update(state=HiddenState(), zero_grad=zero_grad)

    def show_state(self) -> None:
        """Give the optimizer back as it was."""
        vars(self.optimizer).update(state=self._state)
        vars(self.optimizer).pop("zero_grad", None)

    def before_step(self) -> None:
        """Tell the twin's groups what the user's say, and run the user's hooks.

        Raises:
            ConfigurationError: a group was added since the run began.
        """
        if len(self.optimizer.param_groups) != len(self.groups):
            raise ConfigurationError(
                f"The optimizer had {len(self.groups)} parameter groups when the run began, and has "
                f"{len(self.optimizer.param_groups)} now. ZeRO divides what is there at the beginning: give all groups "
                "to the optimizer in configure_optimizers, or train with paral_ddp or paral_fsdp."
            )
        step_hooks.run_pre_hooks(self.optimizer)
        for users, twins in self._pairs:
            twins.update({key: _like(value, twins.get(key)) for key, value in hyper_parameters(users).items()})

    def after_step(self) -> None:
        """Tell the user's groups what the twin's say, for some optimizers keep numbers there, and run the hooks."""
        for users, twins in self._pairs:
            users.update({key: value for key, value in hyper_parameters(twins).items() if key in users})
        step_hooks.mark_stepped(self.optimizer)
        step_hooks.run_post_hooks(self.optimizer)


def _like(value: Any, current: Any) -> Any:
    """Return a number as a float where DeepSpeed's optimizers were given one in the place of a tensor."""
    return float(value) if isinstance(current, float) and not isinstance(value, float) else value
