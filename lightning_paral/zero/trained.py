"""Parameters that are trained under ZeRO: those that were when the engine was made."""

from contextlib import ExitStack
from typing import Any, NoReturn

from torch.nn import Module

from lightning_paral.errors import ConfigurationError
from lightning_paral.model.trained import TrainedParameters, listed

_INSTEAD = "Use paral_ddp or paral_fsdp, which train what requires a gradient in each step."


class FixedParameters:
    """Refuses parameters that are frozen, unfrozen or added during a fit.

    DeepSpeed divides gradients and optimizer state of the parameters that are trained when its engine is made. It would
    not train others, and would go on to move frozen ones by their momentum.
    """

    def __init__(self, module: Module, undo: ExitStack) -> None:
        self._trained = TrainedParameters(module, undo)
        self._at_setup = self._trained.by_name

    def check(self) -> None:
        """Check that what is trained is what was at setup.

        Raises:
            ConfigurationError: it is not; names the parameters.
        """
        if not self._trained.have_changed():
            return
        now = self._trained.current_by_name()
        more = [name for name, p in now.items() if p.requires_grad and self._at_setup.get(name) is not p]
        fewer = [name for name, p in now.items() if not p.requires_grad and self._at_setup.get(name) is p]
        if more:
            raise ConfigurationError(
                f"These parameters require a gradient now, and did not, or were not in the module, when training "
                f"began: {listed(more)}. ZeRO trains what required a gradient then. {_INSTEAD}"
            )
        if fewer:
            raise ConfigurationError(
                f"These parameters were frozen since training began: {listed(fewer)}. ZeRO would go on to change them, "
                f"by momentum and weight decay. Freeze them before fit, in __init__ or configure_model. {_INSTEAD}"
            )
        self._trained.look()


def refuse_groups(optimizer: Any) -> None:
    """Let `optimizer.add_param_group`, which DeepSpeed's optimizers do not have, say so."""

    def add_param_group(*_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            "optimizer.add_param_group was called under ZeRO, which divides the optimizer's groups among the ranks "
            f"when training begins: give it all of them in configure_optimizers. {_INSTEAD}"
        )

    optimizer.add_param_group = add_param_group
