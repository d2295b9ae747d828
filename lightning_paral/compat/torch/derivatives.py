"""Notice derivatives that code computes: backward passes, transforms of `torch.func`, and forward-mode AD."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.patches import replace_attributes

NAMES: Names = {
    "torch.autograd": {"_engine_run_backward(t_outputs)": "check which gradients the code of a step asks for"},
    "torch._C._functorch": {
        "peek_interpreter_stack": "refuse transforms of torch.func around the layers of a pipeline",
        "is_functorch_wrapped_tensor": "leave out tensors without memory where others are found by their memory",
    },
    "torch.Tensor": {"_is_zerotensor": "leave out tangents without memory where tensors are found by their memory"},
    "torch.autograd.forward_ad": {"_current_level": "refuse forward-mode AD around the layers of a pipeline"},
}

_INPUTS = 3  # the position of the inputs, which follow grad_outputs, retain_graph and create_graph


def check_backward_passes(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> Callable[[], None]:
    """Call `check(outputs, inputs)` before each backward pass, and return a function that undoes this.

    Outputs and inputs are tensors or `GradientEdge`s. `inputs` is empty if gradients of all leaves are computed.
    """
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        check(t_outputs, args[_INPUTS] or ())
        return original(t_outputs, *args, **kwargs)

    return replace_attributes(torch.autograd, {"_engine_run_backward": run_backward})


def is_in_transform() -> bool:
    """Return whether the running code is inside a transform of `torch.func`, or a level of forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_of_transform(tensor: Tensor) -> bool:
    """Return whether `tensor` is one without memory, which a transform or forward-mode AD has created."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or bool(tensor._is_zerotensor())
