"""What DTensors do otherwise while a module is sharded, so that user code written for whole tensors stays right."""


from torch.distributed.tensor import DTensor

from lightning_paral.fsdp.assignment import Params, ShardedData
from lightning_paral.fsdp.draws import handlers, set_items


class DTensorSemantics:
    """Installed from when a module is sharded to when it is given back.

    While installed, on any DTensor divided by rows: `tensor.data = value` arrives; random operations draw what one
    process draws; writing by index, `copy_` of a whole tensor, and in-place operations on parts (`p.data[0].zero_()`)
    arrive in the rows that this rank holds.
    """

    def __init__(self, params: Params) -> None:
        self._ours = handlers()
        registered = DTensor._op_dispatcher._custom_op_handlers
        names = ("data", "__setitem__")
        self._others = {operation: registered[operation] for operation in self._ours if operation in registered}
        self._attributes = {name: vars(DTensor)[name] for name in names if name in vars(DTensor)}
        registered.update(self._ours)
        DTensor.data = ShardedData(params)  # type: ignore[misc, assignment]
        DTensor.__setitem__ = set_items  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give DTensors back as they were."""
        registered = DTensor._op_dispatcher._custom_op_handlers
        for operation in self._ours:
            registered.pop(operation, None)
        registered.update(self._others)
        for name in ("data", "__setitem__"):
            if name in vars(DTensor):
                delattr(DTensor, name)
        for name, value in self._attributes.items():
            setattr(DTensor, name, value)
