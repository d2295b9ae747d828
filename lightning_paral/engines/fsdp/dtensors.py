"""Changes to DTensors while a module is sharded, so that user code written for plain tensors stays correct."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.checkpoint.shards import refuse_export
from lightning_paral.compat.torch.dtensor import operation_handlers
from lightning_paral.compat.torch.fsdp import name_of
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.engines.fsdp.data_assignment import DataDescriptor
from lightning_paral.engines.fsdp.gathered_ops import CONVERSIONS
from lightning_paral.engines.fsdp.guards import refuse_hook
from lightning_paral.engines.fsdp.muon import FullNewtonSchulz
from lightning_paral.engines.fsdp.parameter_hooks import ParameterHooks
from lightning_paral.engines.fsdp.sharded_ops import handlers, set_items


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a DTensor, as in `copy.deepcopy(self.state_dict())`, which fails in torch 2.13."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only leaves of the graph can be copied with copy.deepcopy. Use tensor.detach().clone()."
            )
        copied = tensor.detach().clone()
        if isinstance(tensor, Parameter):
            copied = Parameter(copied, tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


class DTensorSemantics:
    """Changes the operations of all DTensors while a module is sharded, until `remove` is called.

    - `tensor.data = value`, writing by index, `copy_` from a full tensor, and in-place operations on views
      (`p.data[0].zero_()`) change the shard of this rank.
    - Random operations draw the numbers that one process would draw.
    - Numbers, such as `float(tensor.norm())`, are computed from the shards of all ranks.
    - Outside steps, operations accept full tensors together with DTensors.
    - Hooks on sharded parameters are called as under DDP, or refused.
    - Muon orthogonalizes full matrices.
    - Writing a DTensor to a file, which would have only this rank's part, is an error.

    Args:
        params: the `FSDPParam`s of the module.
        in_step: returns whether a step is running.
        hooks: keeps the hooks of sharded parameters.
    """

    def __init__(self, params: list[Any], in_step: Callable[[], bool], hooks: ParameterHooks) -> None:
        self._params = params
        self._hooks = hooks
        self._by_id: dict[int, Any] = {}
        registered = operation_handlers()
        self._ours = handlers(in_step)
        self._others = {operation: registered[operation] for operation in self._ours if operation in registered}
        registered.update(self._ours)
        attributes = {
            "data": DataDescriptor(self._param_of),
            "__setitem__": set_items,
            "__deepcopy__": _deepcopy,
            "__reduce_ex__": refuse_export,
            "untyped_storage": refuse_export,
        }
        attributes |= CONVERSIONS
        attributes["register_hook"] = self._keep_hooks_of_parameters(DTensor.register_hook)
        method = "register_post_accumulate_grad_hook"
        attributes[method] = self._refuse_hooks_of_parameters(method, getattr(DTensor, method))
        self._end_attributes = replace_attributes(DTensor, attributes)
        self._newton_schulz = FullNewtonSchulz()

    def _param_of(self, tensor: Any) -> Any:
        for _ in range(2):
            param = self._by_id.get(id(tensor))
            if param is not None and param.sharded_param is tensor:
                return param
            # FSDP2 may have replaced the sharded parameters.
            self._by_id = {id(param.sharded_param): param for param in self._params}
        return None

    def _keep_hooks_of_parameters(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: Any, hook: Any) -> Any:
            param = self._param_of(tensor)
            return register(tensor, hook) if param is None else self._hooks.register(param, tensor.requires_grad, hook)

        return register_hook

    def _refuse_hooks_of_parameters(self, method: str, register: Callable[..., Any]) -> Callable[..., Any]:
        def register_unless_parameter(tensor: Any, hook: Any) -> Any:
            param = self._param_of(tensor)
            if param is not None:
                refuse_hook(str(name_of(param)), method)
            return register(tensor, hook)

        return register_unless_parameter

    def remove(self) -> None:
        """Restore the operations of DTensors."""
        registered = operation_handlers()
        for operation in self._ours:
            registered.pop(operation, None)
        registered.update(self._others)
        self._end_attributes()
        self._newton_schulz.remove()
