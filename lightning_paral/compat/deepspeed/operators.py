"""Take over the loading of DeepSpeed's operators, and leave some of them out.

DeepSpeed 0.19.8 compiles a missing operator silently, in whichever process asks for it, into torch's cache. That cache
does not distinguish versions, and waits forever for the lock of a process that was killed. All operators go through
`OpBuilder.jit_load`, also those that users' code asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning_paral.compat.private_name import PrivateName

_COMPATIBLE = PrivateName(
    name="deepspeed.ops.__compatible_ops__",
    purpose="to keep DeepSpeed from compiling collectives in shared memory, which only its inference uses",
    reason="no option or variable of the environment leaves them out",
    seen="deepspeed 0.19.8",
    upstream="https://github.com/deepspeedai/DeepSpeed/issues/7625",
)
NAMES = (
    PrivateName(
        name="deepspeed.ops.op_builder.builder.OpBuilder.jit_load",
        purpose="to keep compiled operators by version and processor, and to compile them one at a time",
        reason="nothing public is called before an operator is compiled",
        seen="deepspeed 0.19.8",
        parameters=("self", "verbose"),
    ),
    PrivateName(
        name="deepspeed.ops.op_builder.cpu.AsyncIOBuilder",
        purpose="to compile the operator for NVMe on CUDA without the CUDA toolkit",
        reason="deepspeed.ops.op_builder has the builder of the current accelerator only",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.ops.op_builder.builder.CUDAOpBuilder",
        purpose="to know which operators depend on the CUDA toolkit",
        reason="it is not among the names of deepspeed.ops.op_builder",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops",
        purpose="to let DeepSpeed find operators that were loaded from our folder",
        reason="only OpBuilder.jit_load, which is replaced, puts them there",
        seen="deepspeed 0.19.8",
    ),
    _COMPATIBLE,
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.shm_comm_op",
        purpose="to make sure that they were left out",
        reason="nothing public says it",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)

_SHARED_MEMORY = ("deepspeed_shm_comm", "shm_comm")


@contextmanager
def loaded_by(load: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Let operators that are not installed be loaded by `load(builder, compile_and_load)` inside this context."""
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
    """Return the CPU accelerator's builder of the same sources in the place of the CUDA accelerator's of `async_io`.

    Nothing in these sources is of CUDA, but the latter needs the CUDA toolkit: it fails with a TypeError where there is
    none, as in torch's wheels, and links the driver's library, of which toolkits have a stub elsewhere.
    """
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    return AsyncIOBuilder() if is_for_cuda(builder) and builder.name == AsyncIOBuilder.NAME else builder


def is_for_cuda(builder: Any) -> bool:
    """Whether `builder` compiles with the CUDA toolkit."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    return isinstance(builder, CUDAOpBuilder)


def leave_out_shared_memory() -> None:
    """Keep backends that are made from now on from compiling collectives in shared memory."""
    import deepspeed

    for name in _SHARED_MEMORY:
        deepspeed.ops.__compatible_ops__[name] = False


def check_shared_memory_left_out(backend: Any) -> None:
    """Raise a `PrivateNameError` if `backend` has them nevertheless."""
    if backend.shm_comm_op is not None:
        raise _COMPATIBLE.error("it no longer leaves them out")
