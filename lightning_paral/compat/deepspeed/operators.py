"""Replace the function that loads DeepSpeed's operators, and disable some operators.

DeepSpeed 0.19.8 compiles a missing operator silently, in any process that needs it, and stores it in torch's cache.
That cache does not distinguish versions, and a process waits forever for the lock of a process that was killed. All
operators are loaded by `OpBuilder.jit_load`, including those that users' code loads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "deepspeed.ops.op_builder.builder.OpBuilder": {
        "jit_load(verbose)": "cache compiled operators by version and processor, one at a time",
        "_loaded_ops": "let DeepSpeed find operators loaded from our folder",
    },
    "deepspeed.ops.op_builder.cpu": {
        "AsyncIOBuilder": "compile the NVMe operator on a node that has GPUs but no CUDA toolkit",
    },
    "deepspeed.ops.op_builder.builder": {"CUDAOpBuilder": "know which operators depend on the CUDA toolkit"},
    "deepspeed.ops": {"__compatible_ops__": "keep DeepSpeed from compiling shared-memory collectives (deepspeed#7625)"},
    "deepspeed.comm.torch.TorchBackend": {".shm_comm_op": "check that shared-memory collectives are disabled"},
}

_SHARED_MEMORY = ("deepspeed_shm_comm", "shm_comm")


@contextmanager
def load_operators_by(load: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside this context, call `load(builder, compile_and_load)` to load an operator that is not installed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    plain = OpBuilder.jit_load
    if hasattr(plain, "__wrapped__"):  # inside another such context
        yield
        return

    @wraps(plain)
    def jit_load(self: Any, verbose: bool = True) -> Any:
        builder = _without_cuda(self)
        module = load(builder, partial(plain, builder, verbose))
        OpBuilder._loaded_ops[self.name] = module
        return module

    OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        OpBuilder.jit_load = plain


def _without_cuda(builder: Any) -> Any:
    """Return the CPU builder in place of the CUDA builder of `async_io`, which compiles the same sources.

    The sources do not use CUDA, but the CUDA builder needs the CUDA toolkit: without it, for example with torch's
    wheels, it fails with a TypeError. It also links the CUDA driver's library, but does not search the
    toolkit's folder of stubs.
    """
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    return AsyncIOBuilder() if is_for_cuda(builder) and builder.name == AsyncIOBuilder.NAME else builder


def is_for_cuda(builder: Any) -> bool:
    """Return whether `builder` compiles with the CUDA toolkit."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    return isinstance(builder, CUDAOpBuilder)


def disable_shared_memory() -> None:
    """Keep backends that are created after this call from compiling shared-memory collectives."""
    import deepspeed

    for name in _SHARED_MEMORY:
        deepspeed.ops.__compatible_ops__[name] = False


def check_shared_memory_disabled(backend: Any) -> None:
    """Raise a `PrivateNameError` if `backend` has compiled shared-memory collectives."""
    if backend.shm_comm_op is not None:
        raise named(NAMES, "__compatible_ops__").error("it no longer disables them")
