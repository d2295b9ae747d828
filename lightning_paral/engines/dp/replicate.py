"""Copy a module to the other devices for one step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.lightning.strategies import set_device
from lightning_paral.compat.torch.modules import copy_without_values, own_buffers, own_children, own_parameters
from lightning_paral.engines.dp.broadcast import broadcast, copy_to
from lightning_paral.engines.dp.metrics import MetricCopies, is_metric
from lightning_paral.errors import ConfigurationError


class Replicas:
    """Copies of `master` for one step.

    As with `torch.nn.parallel.replicate`, a copy has its own parameters and buffers, and shares all other attributes by
    reference; attributes assigned to it are lost after the step. Unlike with `replicate`, `parameters()` of a copy
    yields its parameters, methods stored as attributes are bound to the copy, and metrics are copied by `MetricCopies`.

    Args:
        master: the module; all its parameters are on one device.
        devices: devices of the copies.
        metrics: the metrics of each copy.
        before_backward: called before gradients flow back into the master; raises an error if they must not.
    """

    def __init__(
        self,
        master: Module,
        devices: Sequence[torch.device],
        metrics: Sequence[MetricCopies],
        before_backward: Callable[[], None],
    ) -> None:
        self._devices = devices
        self._before_backward = before_backward
        self._originals = list(_modules(master))
        self._copies = [
            _copy_structure(self._originals, device, metric_copies)
            for device, metric_copies in zip(devices, metrics, strict=True)
        ]
        self._copy_buffers()
        self.copy_parameters()
        self.modules: list[Any] = [copies[id(master)] for copies in self._copies]

    def copy_parameters(self) -> None:
        """Copy the master's current parameters to all copies, as new tensors."""
        parameters = _by_id(map(own_parameters, self._originals))
        self._masters = list(parameters.values())
        self._memory = [master.data_ptr() for master in self._masters]
        self._on_devices = broadcast(self._masters, self._devices, self._before_backward)
        self._frozen = [copy for copies in self._on_devices for copy in copies if not copy.requires_grad]
        for copies, tensors in zip(self._copies, self._on_devices, strict=True):
            values = dict(zip(parameters, tensors, strict=True))
            for original in self._originals:
                copy = copies[id(original)]
                own: dict[str, Any] = own_parameters(copy)
                own.clear()
                for name, parameter in own_parameters(original).items():
                    value = None if parameter is None else values[id(parameter)]
                    # `setattr`, because recurrent layers keep a list of the weights that are assigned to them.
                    setattr(copy, name, value)
                    # An attribute of this name would hide the tensor that `torch.func.functional_call` swaps in.
                    copy.__dict__.pop(name, None)
                    own[name] = value

    def copy_values(self) -> None:
        """Copy the master's current values into the copies' parameters, for the backward pass of the last step.

        Skip parameters of the master that have since been given new memory: the graph of the step uses the old memory,
        whose values the copies have.
        """
        for tensors in self._on_devices:
            for master, copy, memory in zip(self._masters, tensors, self._memory, strict=True):
                if master.data_ptr() == memory:
                    copy.data.copy_(master.data)

    def parameters_of_copy(self, index: int) -> dict[int, Tensor]:
        """Return the parameters of the copy with this index, by the `id` of the master's parameters."""
        return {id(master): copy for master, copy in zip(self._masters, self._on_devices[index], strict=True)}

    def check_frozen(self) -> None:
        """Check that the step unfroze no parameter of a copy, whose gradient would be lost with the copy.

        Raises:
            ConfigurationError: the step unfroze a parameter.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ConfigurationError(
                "A step unfroze a parameter. Under paral_dp a step runs in replicas, whose parameters are copies. "
                "Unfreeze in a hook such as on_train_batch_start, or use paral_ddp."
            )

    def _copy_buffers(self) -> None:
        buffers = _by_id(map(own_buffers, self._originals))
        # Buffers that require gradients, such as those of vector quantizers, are broadcast like parameters.
        trained = {key: buffer for key, buffer in buffers.items() if buffer.requires_grad}
        plain = {key: buffer for key, buffer in buffers.items() if key not in trained}
        trained_copies = broadcast(list(trained.values()), self._devices, self._before_backward)
        plain_copies = copy_to(self._devices, list(plain.values()))
        for copies, *tensors in zip(self._copies, plain_copies, trained_copies, strict=True):
            values = dict(zip([*plain, *trained], [*tensors[0], *tensors[1]], strict=True))
            for original in self._originals:
                own_buffers(copies[id(original)]).update(
                    {name: values[id(buffer)] for name, buffer in own_buffers(original).items() if buffer is not None}
                )


def _modules(module: Module, seen: set[int] | None = None) -> Iterator[Module]:
    """Yield `module` and its submodules, each once, without metrics."""
    seen = set() if seen is None else seen
    if id(module) in seen or is_metric(module):
        return
    seen.add(id(module))
    yield module
    for child in own_children(module).values():
        if child is not None:
            yield from _modules(child, seen)


def _by_id(tensors_of_modules: Iterable[Mapping[str, Tensor | None]]) -> dict[int, Tensor]:
    return {id(tensor): tensor for own in tensors_of_modules for tensor in own.values() if tensor is not None}


def _copy_structure(originals: Sequence[Module], device: torch.device, metrics: MetricCopies) -> dict[int, Module]:
    """Return copies of `originals` without parameters and buffers, by the `id` of the original."""
    copies: dict[int, Module] = {}
    for original in originals:
        copies[id(original)] = _copy_one(original)
    for original in originals:
        copy = copies[id(original)]
        for name, child in own_children(original).items():
            if child is not None:
                own_children(copy)[name] = metrics.copy_of(child) if is_metric(child) else copies[id(child)]
        for name, value in list(copy.__dict__.items()):
            if type(value) is MethodType and id(value.__self__) in copies:
                copy.__dict__[name] = MethodType(value.__func__, copies[id(value.__self__)])
        set_device(copy, device)
    return copies


def _copy_one(original: Any) -> Module:
    if all("__new__" not in vars(base) for base in type(original).__mro__[:-1]):
        return copy_without_values(original)
    # torch calls `original.__new__(cls)`, which may need the arguments of the constructor.
    original.__dict__["__new__"] = object.__new__
    try:
        copy = copy_without_values(original)
    finally:
        del original.__dict__["__new__"]
    del copy.__dict__["__new__"]
    return copy
