"""Parameters that are trained under ZeRO: those that were when the engine was made."""

from contextlib import ExitStack

from torch.nn import Module

from lightning_paral.compat.torch.torch_function import DisableTorchFunctionSubclass
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, first_names


class FixedParameters:
    """Refuses parameters that are unfrozen or added during a fit.

    DeepSpeed divides gradients and optimizer state of the parameters that are trained when its engine is made, and
    would not train others. Those that are frozen later stay as they are: see `Usage`.
    """

    def __init__(self, module: Module, undo: ExitStack) -> None:
        self._trained = TrainedParameters(module, undo)
        self._at_setup = self._trained.by_name

    def check(self) -> None:
        """Check that nothing is trained but what was at setup.

        Raises:
            ConfigurationError: there is; names the parameters.
        """
        with DisableTorchFunctionSubclass():  # attributes of partitioned parameters are slow
            if not self._trained.have_changed():
                return
            now = self._trained.current_by_name()
            self._trained.update()
        more = [name for name, p in now.items() if p.requires_grad and self._at_setup.get(name) is not p]
        if more:
            raise ConfigurationError(
                f"These parameters require a gradient now, and did not, or were not in the module, when training "
                f"began: {first_names(more)}. ZeRO trains what required a gradient then. Use paral_ddp or paral_fsdp, "
                "which train what requires a gradient in each step."
            )
