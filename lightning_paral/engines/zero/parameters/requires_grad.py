"""Check that a fit under ZeRO trains the parameters that required a gradient when its engine was built."""

from contextlib import ExitStack

from torch.nn import Module

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, first_names


class FixedParameters:
    """Rejects parameters that are unfrozen or added during a fit.

    DeepSpeed shards gradients and optimizer state of the parameters that require a gradient when its engine is built,
    and would not train others. Parameters that are frozen later keep their values: see `Usage`.

    Args:
        module: the module at the beginning of training.
        undo: a stack; closing it ends the watching.
    """

    def __init__(self, module: Module, undo: ExitStack) -> None:
        self._trained = TrainedParameters(module, undo)
        self._at_setup = self._trained.by_name

    def check(self) -> None:
        """Check that every parameter that requires a gradient now did so at setup.

        Raises:
            ConfigurationError: some parameters did not. The message names them.
        """
        with DisableTorchFunctionSubclass():  # reading attributes of partitioned parameters is slow otherwise
            if not self._trained.have_changed():
                return
            now = self._trained.current_by_name()
            self._trained.update()
        added = [name for name, p in now.items() if p.requires_grad and self._at_setup.get(name) is not p]
        if added:
            raise ConfigurationError(
                "These parameters require a gradient now, but were frozen or not in the module when training began: "
                f"{first_names(added)}. ZeRO trains only parameters that required a gradient then. Use paral_ddp or "
                "paral_fsdp, which train all parameters that require a gradient in each step."
            )
