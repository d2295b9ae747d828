"""Build a module on the meta device, then materialize it one unit at a time, with the values of ordinary construction.

While `configure_model` runs, large tensors are created on the meta device. Every operation on them is logged, with the
state of the random number generator before it. Any tensor can then be materialized by repeating the operations that
produced it. Operations that draw random numbers also run at once, into memory that is freed immediately, so that later
draws get the numbers that they would get without deferral.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.tensors import tree_leaves, tree_map_only
from lightning_paral.model.deferred import recorder
from lightning_paral.model.deferred.recorder import MetaDisguise, Recorder, is_pretrained


class DeferredConstruction:
    """The tensors of a module that were deferred while it was built, and the log to materialize them from.

    Args:
        log: has recorded how their values are computed.
    """

    def __init__(self, log: Recorder) -> None:
        self._log = log
        self._meta: dict[int, tuple[Tensor, Tensor]] = {}
        """By `id`, a tensor and where its values come from: the deferred one that it was when the module was built,
        because its dtype may change later, or one that `from_pretrained` has read."""
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}
        """By `id`, a tensor that several units may share, and the materialized one."""

    def find_deferred(self, module: Module) -> None:
        """Find the deferred tensors that `module` holds, once it is built."""
        for tensor in _tensors_of(module.modules()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if self._log.owns(local):
                self._meta[id(tensor)] = tensor, local.detach()

    def defer_loaded(self, module: Module) -> None:
        """Replace large parameters that `from_pretrained` has read with meta tensors, until `fill` is called.

        They are views of memory-mapped files, and take no memory until they are converted to another dtype. Converting
        the module would take memory for all of them at once; `fill` takes it for one unit at a time.
        """
        meta: dict[int, Tensor] = {}
        for parameter in module.parameters():
            has_values = type(parameter) is Parameter and not parameter.is_meta
            if has_values and parameter.nbytes > recorder.DEFERRED_BYTES and is_pretrained(parameter):
                placeholder = _like(parameter, torch.empty_like(parameter, device="meta"))
                meta[id(parameter)] = placeholder
                self._meta[id(placeholder)] = placeholder, parameter.detach()
        _replace(module.modules(), meta)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is left to materialize."""
        return not self._meta

    def fill(self, modules: Iterable[Module]) -> None:
        """Materialize the deferred tensors that `modules` hold directly; those of submodules stay deferred.

        Pass all modules that share a parameter in the same call: it is materialized once.
        """
        modules = list(modules)
        held = dict.fromkeys(map(id, _tensors_of(modules)))
        found = [self._meta.pop(key) for key in held if key in self._meta]
        values = iter(self._log.materialize([source for _, source in found if source.is_meta]))
        filled = {key: new for key, (_, new) in self._shared.items()}
        for tensor, source in found:
            filled[id(tensor)] = new = _like(tensor, next(values) if source.is_meta else source)
            if not isinstance(tensor, Parameter):
                self._shared[id(tensor)] = tensor, new  # units may share buffers, but never parameters
        _replace(modules, filled)


@contextmanager
def recording(
    module: LightningModule | None, device: torch.device, precision: Precision
) -> Iterator[DeferredConstruction | None]:
    """Create large tensors on the meta device inside the block, and record how to compute their values later.

    Args:
        module: the module that gets the tensors. `None`, as in `trainer.init_module()`, defers nothing.
        device: the device of this rank.
        precision: the precision plugin of the run.

    Yields:
        DeferredConstruction | None: computes the values, once the block has ended. `None` if `module` is `None`.
    """
    if module is None:
        yield None
        return
    log = Recorder(device)
    deferred = DeferredConstruction(log)
    with device, MetaDisguise(log), log:
        yield deferred
    deferred.find_deferred(module)
    if isinstance(precision, DoublePrecision | HalfPrecision):  # these convert the module to another dtype
        deferred.defer_loaded(module)


def has_mapped_weights(module: LightningModule) -> bool:
    """Return whether `configure_model` creates weights that `from_pretrained` memory-maps from files."""
    return is_overridden("configure_model", module) and any(map(is_pretrained, module.parameters()))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    value = value.to(tensor.dtype)  # `module.bfloat16()` may have been called in between
    if isinstance(tensor, DTensor):
        value = DTensor.from_local(
            value, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if not isinstance(tensor, Parameter):
        return value
    parameter = Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _tensors_of(modules: Iterable[Module]) -> list[Tensor]:
    """Return the tensors that `modules` hold directly: parameters, buffers, attributes, and those in collections."""
    values = [value for module in modules for name, value in vars(module).items() if name != "_modules"]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _replace(modules: Iterable[Module], new: Mapping[int, Tensor]) -> None:
    """Replace the tensors that `modules` hold directly, by their `id`."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if name != "_modules" and any(id(leaf) in new for leaf in tree_leaves(value)):
                replaced = tree_map_only(Tensor, lambda tensor: new.get(id(tensor), tensor), value)
                if isinstance(value, list):
                    value[:] = replaced  # in place, as other objects may hold the list too
                elif isinstance(value, dict):
                    value.update(replaced)
                else:
                    vars(module)[name] = replaced
