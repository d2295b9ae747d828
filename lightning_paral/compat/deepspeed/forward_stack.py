"""The modules whose forwards are under way at stage 3, which DeepSpeed keeps in a list of a module."""

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK",
        purpose="to know which module uses a parameter of another one, and to empty it after a failure",
        reason="register_external_parameter wants the module, and DeepSpeed forgets a forward only when it ends",
        seen="deepspeed 0.19.8",
    ),
)


def innermost_forward() -> Module | None:
    """Return the module whose forward runs now; `None` between forwards."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Each engine leaves its module at the bottom of the stack, for good.
    innermost: Module | None = FWD_MODULE_STACK[-1] if len(FWD_MODULE_STACK) > 1 else None
    return innermost


def leave_out_of_forwards(module: Module) -> None:
    """Take out `module`, which an engine has left at the bottom of the stack."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK[:] = [each for each in FWD_MODULE_STACK if each is not module]


def forget_forwards() -> None:
    """Take every forward for ended."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK.clear()
