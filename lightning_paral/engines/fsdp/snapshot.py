"""What a module was before it was sharded, and the way back to it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.collectives import all_gather_single
from lightning_paral.compat.torch.fsdp_state import forget
from lightning_paral.compat.torch.module_hooks import hook_tables
from lightning_paral.compat.torch.modules import own_parameters

LEFT_SHARDED = "_lightning_paral_left_sharded"
"""Set on a module that could not be given back, to the reason."""


class Belongings:
    """The class, attributes, hooks and parameters of each submodule.

    Parameters keep their identity, so references to them and ties between them outlive the run; while they are sharded
    they hold nothing.
    """

    def __init__(self, root: Module) -> None:
        self._parts = {module: _Part(module) for module in root.modules()}

    def note(self, modules: list[Module]) -> None:
        """Take the parameters that `modules` have now for what they had before: they have just got their values."""
        for module in modules:
            self._parts[module].note()

    def release(self, modules: list[Module]) -> None:
        """Free the whole values of what has been sharded in `modules`."""
        for module in modules:
            self._parts[module].release()

    def original(self, module: Module, name: str) -> Parameter:
        """Return the parameter that `module` had before under `name`."""
        parameter = self._parts[module].parameters[name]
        assert parameter is not None
        return parameter

    def seal(self) -> None:
        """Take what each submodule has gained up to now for ours, to be taken away again."""
        for part in self._parts.values():
            part.seal()

    def restore(self, gather: "Gather | str") -> dict[Parameter, Parameter]:
        """Undo it all. Parameters come back whole, on the host. *Collective* over the group of `gather`.

        A string in place of `gather` says why nothing can be brought together; everything stays as it is.

        Returns:
            dict[Parameter, Parameter]: by sharded parameter, the module's own.
        """
        if isinstance(gather, str):
            vars(next(iter(self._parts)))[LEFT_SHARDED] = gather
            return {}
        whole: dict[Parameter, Parameter] = {}
        for part in self._parts.values():
            part.restore(gather, whole)
        return whole


class _Part:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._class = type(module)
        self._attributes = set(vars(module))
        self._hooks = {name: set(table) for name, table in hook_tables(module).items()}
        self.parameters = dict(own_parameters(module))
        self._gained: tuple[set[str], dict[str, set[int]]] = (set(), {})

    def note(self) -> None:
        self.parameters = dict(own_parameters(self._module))

    def release(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter is not None and own_parameters(self._module).get(name) is not parameter:
                parameter.data = parameter.new_empty(0)

    def seal(self) -> None:
        hooks = {name: set(table) - self._hooks[name] for name, table in hook_tables(self._module).items()}
        self._gained = (set(vars(self._module)) - self._attributes, hooks)

    def restore(self, gather: "Gather", whole: dict[Parameter, Parameter]) -> None:
        module, present = self._module, own_parameters(self._module)
        for name, current in list(present.items()):
            if current is None:
                continue
            if current not in whole:
                before = self.parameters.get(name)
                whole[current] = _given_back(current, current if before is None else before, gather)
            present[name] = whole[current]
        attributes, hooks = self._gained
        for name in attributes:
            vars(module).pop(name, None)
        tables = hook_tables(module)
        for name, keys in hooks.items():
            for key in keys:
                tables[name].pop(key, None)
        if isinstance(module, FSDPModule) and type(module) is not self._class:
            module.__class__ = self._class  # type: ignore[assignment]
            forget(module)


def _given_back(current: Parameter, before: Parameter, gather: "Gather") -> Parameter:
    value = gather(current) if isinstance(current, DTensor) else current.detach()
    if value.is_meta:
        return current
    before.data = value if isinstance(current, DTensor) else value.to("cpu", copy=True)
    before.requires_grad_(current.requires_grad)
    before.grad = None
    return before


class Gather:
    """Brings together the rows of a sharded tensor. *Collective* over `group`.

    Args:
        group: of all ranks that call, or of one copy of the model's.
        ranks: ranks of `group` that together hold one copy, in the order of shards.
        on_host: whether `group` carries CPU tensors only.
    """

    piece_bytes = 2**26
    """Bytes of a tensor that are gathered at a time."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], on_host: bool = False) -> None:
        self._group = group
        self._ranks = ranks
        self._on_host = on_host

    @torch.no_grad()
    def __call__(self, tensor: Any) -> Tensor:
        """Return the full `tensor` on the host: the GPU may have no room for it at the end of a run."""
        shape, local = tensor.shape, tensor.to_local()
        if local.is_meta:
            return torch.empty(shape, dtype=local.dtype, device="meta")
        num_rows, world_size = -(-shape[0] // len(self._ranks)), dist.get_world_size(self._group)
        whole = torch.empty(shape, dtype=local.dtype)
        step = max(1, self.piece_bytes // max(1, world_size * shape[1:].numel() * local.element_size()))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            held = local[start:stop].cpu() if self._on_host else local[start:stop]
            mine = held.new_zeros((stop - start, *shape[1:]))
            mine[: len(held)].copy_(held)
            pieces = held.new_empty((world_size, *mine.shape))
            # As bytes: gloo knows neither float8 nor int16.
            as_bytes = [tensor.view(-1).view(torch.uint8) for tensor in (pieces, mine)]
            all_gather_single(*as_bytes, group=self._group)
            on_host = pieces.cpu()
            for number, rank in enumerate(self._ranks):
                rows = whole[number * num_rows + start : number * num_rows + stop]
                rows.copy_(on_host[rank, : len(rows)])
        return whole
