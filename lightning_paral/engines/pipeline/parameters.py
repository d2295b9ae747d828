"""Keep the parameters of this stage only, with what stands for the others, and gather all at the end of a run."""

import sys
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.comm.coalescing import broadcast
from lightning_paral.compat.torch.modules import not_persistent, own_buffers, own_parameters
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.engines.pipeline.calls import Pipeline
from lightning_paral.engines.pipeline.division import Division
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.gradients import full_copy

_DATA: Any = Tensor.data
_LIBRARIES = ("lightning_paral.", "torch.nn.modules.", "torch.nn.parameter.", "torch.optim.", "torch.amp.")
"""What may read gradients: it skips parameters without one, and computes nothing over all of them."""


# What stands for a parameter of another stage


class ElsewhereParameter(FlatShard):
    """A parameter of another stage: it has a shape, but no values and no gradient.

    Optimizers skip it, because its gradient is `None`. Other code that reads gradients would compute with those of one
    stage only, such as a norm, so it gets an error.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Say whether two parameters are the same, which `BaseFinetuning` asks by their values.

        Let copies pass, as by `load_state_dict`: the stage that has the parameter makes them.
        """
        if func is torch.ops.aten.equal.default:
            return args[0] is args[1]
        if func is torch.ops.aten.copy_.default and is_elsewhere(args[0]):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse(f"{self.description} was copied, with a module, but it is on that stage only. Copy it before the run.")

    @property
    def grad(self) -> Tensor | None:
        """`None` for libraries and optimizers; for other code an error."""
        frame = sys._getframe(1)
        while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
            frame = frame.f_back
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_LIBRARIES) and not isinstance(frame.f_locals.get("self"), Optimizer):
            refuse(f"The gradient of {self.description} was read, but it is on that stage only.")
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            refuse(f"The gradient of {self.description} was set, but it is on that stage only.")

    @property
    def data(self) -> Tensor:
        """An error: torch ends the process if an ordinary tensor gets these data."""
        refuse(f"The values of {self.description} were read, but they are on that stage only.")

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, FlatShard):
            refuse(f"Values were assigned to {self.description}, which has its values on that stage only.")
        _DATA.__set__(self, value)


def elsewhere(parameter: Parameter, device: torch.device, description: str) -> Parameter:
    """Return what stands for `parameter`, with its shape, dtype and attributes, and reports `device`.

    Args:
        parameter: the parameter of another stage.
        device: the device of this rank.
        description: names the parameter and its stage in errors.
    """
    nothing = partial(torch.empty, 0, dtype=parameter.dtype)  # unlike a lambda, it can be pickled
    shard = FlatShard(parameter.shape, parameter.dtype, 0, 0, nothing, device=device)
    standing = Parameter(shard, requires_grad=parameter.requires_grad)
    standing.__class__ = ElsewhereParameter  # type: ignore[assignment]
    vars(standing).update(vars(parameter) | vars(standing), description=description)
    return standing


def is_elsewhere(parameter: Tensor) -> bool:
    """Return whether `parameter` stands for one that only other stages have."""
    return isinstance(parameter, FlatShard)


class StageOptimizerState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer: the states on this stage. Reading those of other stages is an error."""

    def __missing__(self, parameter: Any) -> Any:
        """Return a new state, unless `parameter` is of another stage."""
        if isinstance(parameter, FlatShard):
            refuse(f"optimizer.state of {parameter.description} was used, but it is on that stage only.")
        return super().__missing__(parameter)


def refuse(message: str) -> NoReturn:
    """Raise a `ConfigurationError` for code that needs what another stage has."""
    raise ConfigurationError(
        f"{message} On all ranks, full_parameter, full_gradient, full_optimizer_state and gradient_norm of "
        "trainer.strategy read it. Clip with Trainer(gradient_clip_val=...). To change parameters, gradients or states "
        "in hooks, train with paral_fsdp."
    )


# The parameters of a stage


def without_elsewhere(tree: Any) -> Any:
    """Return a copy of nested dicts and lists without the tensors that only other stages have."""
    if isinstance(tree, MutableMapping):
        kept = copy(tree)  # preserves attributes of an OrderedDict, such as `_metadata` of a state_dict
        for key, value in tree.items():
            if isinstance(value, FlatShard) and value.local_numel == 0:
                del kept[key]
            else:
                kept[key] = without_elsewhere(value)
        return kept
    if type(tree) is list:
        return [without_elsewhere(value) for value in tree]
    return tree


class Shards(Protocol):
    """Shards the parameters of a stage between steps. Collectives are those of the ranks that hold its shards."""

    def shard(self, module: Module, parts: Sequence[Module]) -> None:
        """Shard the parameters of `parts` as one unit: `module`, and those of its submodules that belong to it."""

    def finish(self) -> None:
        """Prepare steps, after the units of the stage and then the root are sharded."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Return a context in which the module has ordinary parameters, with full values. *Collective*."""

    def take_gradients(self) -> list[tuple[Parameter, Tensor]]:
        """Remove and return the full gradients of the unsharded parameters, each with the shard that it belongs to."""

    def scatter(self, gradients: list[tuple[Parameter, Tensor]]) -> None:
        """Add the means of full gradients to those of the shards, and empty the list. *Collective*."""

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Return the modules' own parameters by shard, with full values on the CPU. *Collective* unless `obstacle`."""


class StageParameters:
    """The parameters of a module that is divided among stages.

    On each stage, the parameters of other stages are replaced with tensors that have a shape but no values.

    Args:
        division: the units and ends of the stages. The other parameters of the root are on all stages.
        pipeline: the pipeline of this rank.
        deferred: computes the values of parameters that have none yet; `None` if all have values.
        shards: shards the parameters of this stage, unit by unit; `None` if each rank holds its whole stage.
    """

    def __init__(
        self, division: Division, pipeline: Pipeline, deferred: DeferredConstruction | None, shards: Shards | None
    ) -> None:
        self.root = division.units.root.module
        self._pipeline = pipeline
        self._dims, self._device = pipeline.dims, pipeline.device
        self._deferred = deferred
        self._shards = shards
        self._placed = division.placed
        self._names = {parameter: name for name, parameter in self.root.named_parameters()}
        self.owner: dict[Parameter, int] = {}
        """The stage of each parameter that is not on all stages, by the object that is in the module."""
        self._standing: dict[Parameter, Parameter] = {}
        """What stands for each parameter of another stage."""

    def divide(self) -> None:
        """Move this stage's parameters to its device, and free the others. All ranks then have the values of the first.

        Parameters that were built in `configure_model` are computed on their own stage only. *Collective*.
        """
        for module, stage in self._placed:
            parts = list(module.modules())
            self._divide(module, parts, stage)
            if stage == self._dims.stage:
                self.owner.update(dict.fromkeys(module.parameters(), stage))
            else:
                self._free(parts, stage)
        inside = {part for module, _ in self._placed for part in module.modules()}
        self._divide(self.root, [part for part in self.root.modules() if part not in inside], None)
        if self._shards is not None:
            self._shards.finish()

    def _divide(self, module: Module, parts: Sequence[Module], stage: int | None) -> None:
        """Give `parts` of `module` values, on the device, and shard them, if they are on this stage or on all."""
        is_own = stage is None or stage == self._dims.stage
        has_values = not any(tensor.is_meta for tensor in _tensors_of(parts))
        if is_own:
            if self._deferred is not None:
                self._deferred.fill(parts)
            for tensor in _tensors_of(parts):
                tensor.data = tensor.data.to(self._device)
        if has_values or stage is None:  # on all ranks, of which only the first may have loaded them
            self._share(_tensors_of(parts), None)
        elif is_own:
            self._share(_tensors_of(parts), self._dims.stage_group())
        if is_own and self._shards is not None:
            self._shards.shard(module, parts)

    def _share(self, tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
        """Give `tensors`, of which some are on the host, the values of the first rank of `group`. *Collective*."""
        on_device = [tensor.data.to(self._device) for tensor in tensors]
        broadcast(on_device, group, 0)
        for tensor, value in zip(tensors, on_device, strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(value)

    def _free(self, parts: Iterable[Module], stage: int) -> None:
        for part in parts:
            own = own_parameters(part)
            for name, parameter in own.items():
                if parameter is None:
                    continue
                standing = self._standing.get(parameter)
                if standing is None:
                    description = f"{self._names[parameter]} of stage {stage}"
                    standing = elsewhere(parameter, self._device, description)
                    self._standing[parameter] = standing
                    self.owner[standing] = stage
                    if not parameter.is_meta:
                        parameter.data = parameter.data.new_empty(0)
                own[name] = standing

    def full(self, parameter: Parameter, value: Tensor | None) -> Tensor | None:
        """Return the full `value` of the stage that has `parameter`, on the device of this rank.

        *Collective* over the pipeline, and over the ranks that hold shards of the value.

        Args:
            parameter: a parameter of the module, of this or another stage.
            value: on the stage that has it, its value, its gradient or a state of the optimizer; may be `None`.
        """
        stage = self.owner.get(parameter)
        if stage is None:
            return None if value is None else full_copy(value)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        group = self._pipeline.values
        source = dist.get_group_rank(group, self._dims.pipeline_ranks[stage])
        about: list[Any] = [None if value is None else (value.shape, value.dtype)]
        dist.broadcast_object_list(about, group=group, group_src=source)
        if about[0] is None:
            return None
        shape, dtype = about[0]
        if value is None:
            full = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            full = value.detach().to(self._device, copy=True)
        broadcast([full], group, source)
        return full

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Give the module its own parameters again, with the values of all stages. *Collective* unless `obstacle`.

        Args:
            obstacle: the reason why values are not fetched from other ranks, so that parameters stay sharded, and those
                of other stages without values; `None` if they are.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by the objects that stood for them.
        """
        unsharded = {} if self._shards is None else self._shards.restore(obstacle)
        if obstacle is not None:
            return {}
        self.owner = {unsharded.get(parameter, parameter): stage for parameter, stage in self.owner.items()}
        originals = {standing: original for original, standing in self._standing.items()}
        for parameter in self.owner:
            full = self.full(parameter, None if is_elsewhere(parameter) else parameter)
            if parameter in originals:
                assert full is not None
                original = originals[parameter]
                if original.is_meta:
                    originals[parameter] = Parameter(full.cpu(), requires_grad=False)
                    vars(originals[parameter]).update(vars(original))
                else:
                    original.data = full.cpu()
                originals[parameter].requires_grad_(parameter.requires_grad)
        for module in self.root.modules():
            own = own_parameters(module)
            own.update({name: originals[each] for name, each in own.items() if each in originals})
        return unsharded | originals

    def share_buffers(self) -> None:
        """Give all stages the buffers of the stage that computes them; the last one computes those on all stages.

        Units may register buffers in a step, which only one stage runs, so the stage names those that it has.
        *Collective* over the pipeline.
        """
        if self._dims.pipeline == 1:
            return
        stage_of = {part: stage for module, stage in self._placed for part in module.modules()}
        own = {
            (name, attribute): (buffer.cpu(), attribute not in not_persistent(part))
            for name, part in self.root.named_modules()
            if stage_of.get(part, self._dims.stage) == self._dims.stage
            for attribute, buffer in own_buffers(part).items()
            if buffer is not None and not is_elsewhere(buffer)
        }
        values: dict[tuple[str, str], tuple[Tensor, bool]] = {}
        for of_rank in gather_objects(own, self._pipeline.values):
            values = of_rank | values  # the last stage comes first
        for (name, attribute), (value, is_persistent) in values.items():
            buffers = own_buffers(self.root.get_submodule(name))
            current = buffers.get(attribute)
            if current is not None and current.shape == value.shape and not is_elsewhere(current):
                current.data.copy_(value)
            elif is_persistent:  # the stage has registered it, or replaced it with one of another shape, in a step
                buffers[attribute] = value.to(self._device)


def _tensors_of(parts: Iterable[Module]) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for tensor in (*own_parameters(part).values(), *own_buffers(part).values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
    return list(tensors.values())
