"""What a module itself holds, as it holds it."""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import PrivateName

_REASON = (
    "setattr and register_parameter run methods that modules and users override, named_parameters(recurse=False) "
    "leaves out entries that are None"
)

NAMES = (
    PrivateName(
        name="torch.nn.Module._parameters",
        purpose="to give a module other parameters, unnoticed by it",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.Module._buffers",
        purpose="to give a module other buffers, unnoticed by it",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.Module._modules",
        purpose="to give a copy of a module copies of what is in it",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)

own_parameters: Callable[[Module], dict[str, Parameter | None]] = attrgetter("_parameters")
"""Return the parameters of a module itself by name: the dictionary in which it keeps them."""

own_buffers: Callable[[Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return the buffers of a module itself by name: the dictionary in which it keeps them."""

own_children: Callable[[Module], dict[str, Module | None]] = attrgetter("_modules")
"""Return the modules in a module itself by name: the dictionary in which it keeps them."""
