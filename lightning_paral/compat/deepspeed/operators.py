"""Take over the loading of DeepSpeed's operators.

DeepSpeed 0.19.8 compiles a missing operator silently, in whichever process asks for it, into torch's cache. That cache
does not distinguish versions, and waits forever for the lock of a process that was killed. All operators go through
`OpBuilder.jit_load`, also those that users' code asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


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
        module = load(self, partial(plain, self, verbose))
        OpBuilder._loaded_ops[self.name] = module
        return module

    OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        OpBuilder.jit_load = plain
