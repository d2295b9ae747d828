"""Modules that torch.compile has compiled."""

import sys

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch._dynamo.OptimizedModule",
        purpose="to tell modules that torch.compile(module) returned",
        reason="torch.compiler has nothing that asks a module",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.nn.Module._compiled_call_impl",
        purpose="to tell modules that module.compile() compiled",
        reason="torch.compiler has nothing that asks a module",
        seen="torch 2.11 to 2.13",
    ),
)


def is_compiled(module: Module) -> bool:
    """Whether `module` itself was compiled, by `torch.compile(module)` or `module.compile()`."""
    compiler = sys.modules.get("torch._dynamo")  # takes long to import, and compiles nothing before
    is_result = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return is_result or module._compiled_call_impl is not None
