"""The modules whose forward is running at stage 3, kept in a module-level list of DeepSpeed."""

from torch.nn import Module

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.parameter_offload": {
        "FWD_MODULE_STACK": "know which module uses another's parameter; empty the list after a failure",
    },
}


def innermost_forward() -> Module | None:
    """Return the module whose forward is running, or `None`."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Each engine puts its module at the bottom of the stack when it is created, and leaves it there.
    innermost: Module | None = FWD_MODULE_STACK[-1] if len(FWD_MODULE_STACK) > 1 else None
    return innermost


def remove_from_forwards(module: Module) -> None:
    """Remove `module`, which an engine has left at the bottom of the stack."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK[:] = [each for each in FWD_MODULE_STACK if each is not module]


def forget_forwards() -> None:
    """Empty the stack, as if every forward had returned."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK.clear()
