"""Recognize modules that were compiled by torch.compile."""

import sys

from torch.nn import Module

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch._dynamo": {"OptimizedModule": "recognize modules that torch.compile(module) returned"},
    "torch.nn.Module": {"_compiled_call_impl": "recognize modules compiled by module.compile()"},
}


def is_compiled(module: Module) -> bool:
    """Return whether `module` itself was compiled, by `torch.compile(module)` or `module.compile()`."""
    compiler = sys.modules.get("torch._dynamo")  # slow to import, and already imported if anything was compiled
    is_result = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return is_result or module._compiled_call_impl is not None
