"""How `deepspeed.zero.Init` divides parameters, and when."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._zero_init_param",
        purpose="to divide parameters of any layout, dimension and dtype",
        reason="zero.Init views them as bytes, which torch refuses for scalars, and takes them for contiguous",
        seen="deepspeed 0.19.8",
        parameters=("self", "param"),
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._post_init_method",
        purpose="to leave modules that from_pretrained builds undivided until their values come",
        reason="nothing public tells zero.Init to stand aside for a while",
        seen="deepspeed 0.19.8",
        parameters=("self", "module"),
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._convert_to_zero_parameters",
        purpose="to divide single parameters that were made whole",
        reason="zero.Init(module=...) divides modules, all at once, and with a context of its own",
        seen="deepspeed 0.19.8",
        parameters=("self", "param_list"),
    ),
)

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""What `zero.Init` puts functions of its own in place of, which choose device and dtype."""


def divide_parameters_by(init: Any, divide: Callable[[Callable[[Parameter], None], Parameter], None]) -> None:
    """Let `init` divide each parameter by `divide(as_deepspeed_does, parameter)`."""
    as_deepspeed_does = init._zero_init_param
    init._zero_init_param = lambda parameter: divide(as_deepspeed_does, parameter)


def divide_modules_by(init: Any, divide: Callable[[Callable[[Module], None], Module], None]) -> None:
    """Let `init` divide the parameters of each module that was made by `divide(as_deepspeed_does, module)`."""
    as_deepspeed_does = init._post_init_method
    init._post_init_method = lambda module: divide(as_deepspeed_does, module)


def divide_whole(init: Any, parameter: Parameter) -> None:
    """Divide a whole parameter. *Collective* over the world; rank 0's values count."""
    init._convert_to_zero_parameters([parameter])


def plain_constructors() -> dict[str, Callable[..., Tensor]]:
    """Return torch's own constructors of tensors, outside of any `zero.Init`."""
    return {name: getattr(torch, name) for name in CONSTRUCTORS}


def choose_constructors(plain: dict[str, Callable[..., Tensor]], use_plain: Callable[[], bool]) -> None:
    """Call torch's own constructors while `use_plain()`, else those of the `zero.Init` that was entered, until it ends.

    Args:
        plain: what `plain_constructors` returned before it was entered.
        use_plain: asked at every call.
    """
    for name, own in plain.items():
        setattr(torch, name, _either(use_plain, own, getattr(torch, name)))


def _either(
    use_plain: Callable[[], bool], plain: Callable[..., Tensor], else_: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        return (plain if use_plain() else else_)(*args, **kwargs)

    return construct
