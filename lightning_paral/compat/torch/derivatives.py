"""Notice derivatives that code computes: backward passes, transforms of `torch.func`, and forward-mode AD."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.patches import replace_attributes

NAMES = (
    PrivateName(
        name="torch.autograd._engine_run_backward",
        purpose="to check which gradients the code of a step asks for",
        reason="torch calls no public hook before torch.autograd.grad, which user code may have imported by name",
        seen="torch 2.11 to 2.13",
        parameters=("t_outputs",),
    ),
    PrivateName(
        name="torch._C._functorch.peek_interpreter_stack",
        purpose="to refuse transforms of torch.func around the layers of a pipeline",
        reason="torch has no public function that tells whether code runs inside a transform",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch._C._functorch.is_functorch_wrapped_tensor",
        purpose="to leave out tensors without memory where others are found by their memory",
        reason="torch has no public function that recognizes tensors inside transforms",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.Tensor._is_zerotensor",
        purpose="to leave out tangents without memory where tensors are found by their memory",
        reason="torch has no public function that recognizes the zeros of forward-mode AD",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.autograd.forward_ad._current_level",
        purpose="to refuse forward-mode AD around the layers of a pipeline",
        reason="torch has no public function that tells whether a dual level is active",
        seen="torch 2.11 to 2.13",
    ),
)

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
