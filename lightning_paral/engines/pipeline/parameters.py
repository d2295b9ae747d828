"""Keep the parameters of this stage only, with what stands for the others, and gather all at the end of a run."""

import sys
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from types import FrameType
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
_LIBRARIES = (
    *("lightning.", "pytorch_lightning.", "lightning_paral."),
    *("torch.nn.modules.", "torch.nn.parameter.", "torch.optim.", "torch.amp."),
)
"""What may read gradients: it skips parameters without one, and computes nothing over all of them."""
_OF_USERS = "lightning.pytorch.utilities.grads"
"""A module of Lightning for user code, whose results are about all parameters that it gets."""


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

    @property
    def grad(self) -> Tensor | None:
        """`None` for libraries and optimizers; for other code an error."""
        if _is_of_user(sys._getframe(1)):
            refuse(f"The gradient of {self.description} was read, but it is on that stage only.")
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            refuse(f"The gradient of {self.description} was set, but it is on that stage only.")

    @property
    def data(self) -> Tensor:
        """A tensor of the same shape without values, for libraries; for other code an error."""
        if _is_of_user(sys._getframe(1)):
            refuse(f"The values of {self.description} were read, but they are on that stage only.")
        values: Tensor = _DATA.__get__(self)
        return values

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
    for name, value in vars(parameter).items():
        vars(standing).setdefault(name, value)
    vars(standing)["description"] = description
    return standing


def is_elsewhere(parameter: Tensor) -> bool:
    """Return whether `parameter` stands for one that only other stages have."""
    return isinstance(parameter, FlatShard)


class StageOptimizerState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer: the states on this stage. Reading those of other stages is an error."""

    def __missing__(self, parameter: Any) -> Any:
        """Return a new state, unless `parameter` is of another stage."""
        if isinstance(parameter, Tensor) and is_elsewhere(parameter):
            refuse(
                f"optimizer.state of {vars(parameter)['description']} was used, but the state is on that stage only."
            )
        return super().__missing__(parameter)


def refuse(message: str) -> NoReturn:
    """Raise a `ConfigurationError` for code that needs what another stage has."""
    raise ConfigurationError(
        f"{message} On all ranks, full_parameter(parameter), full_gradient(parameter) and full_optimizer_state("
        "parameter, key) of trainer.strategy return whole tensors, and gradient_norm() the norm of all gradients. Clip "
        "with Trainer(gradient_clip_val=...). To change parameters, gradients or states in hooks, train with "
        "paral_fsdp."
    )


def _is_of_user(frame: FrameType) -> bool:
    """Return whether the code of `frame` is neither of a library nor in a method of an optimizer."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__", ""))
    is_of_library = f"{name}.".startswith(_LIBRARIES) and name != _OF_USERS
    return not is_of_library and not isinstance(frame.f_locals.get("self"), Optimizer)


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
        self,
        division: Division,
        pipeline: Pipeline,
        deferred: DeferredConstruction | None,
        shards: Shards | None,
    ) -> None:
        self._root = division.units.root.module
        self._pipeline = pipeline
        self._dims, self._device = pipeline.dims, pipeline.device
        self._deferred = deferred
        self._shards = shards
        self._placed = division.placed
        self._names = {parameter: name for name, parameter in self._root.named_parameters()}
        self.owner: dict[Parameter, int] = {}
        """The stage of each parameter that is not on all stages, by the object that is in the module."""
        self._originals: dict[Parameter, Parameter] = {}
        self._standing: dict[Parameter, Parameter] = {}
        """What stands for each parameter of another stage: the inverse of `_originals`, until values are gathered."""

    @property
    def inside(self) -> list[Parameter]:
        """This stage's parameters that are not on other stages."""
        return [parameter for parameter, stage in self.owner.items() if stage == self._dims.stage]

    @property
    def outside(self) -> list[Parameter]:
        """The parameters that are on all stages."""
        return [parameter for parameter in self._root.parameters() if parameter not in self.owner]

    def divide(self) -> None:
        """Move this stage's parameters to its device, and free the others. All ranks then have the values of the first.

        Parameters that were built in `configure_model` are computed on their own stage only. *Collective*.
        """
        for module, stage in self._placed:
            self._divide_unit(module, stage)
        inside = {part for module, _ in self._placed for part in module.modules()}
        parts = [part for part in self._root.modules() if part not in inside]
        if self._deferred is not None:
            self._deferred.fill(parts)
        self._place(parts)
        self._share(_tensors_of(parts), None)
        if self._shards is not None:
            self._shards.shard(self._root, parts)
            self._shards.finish()

    def _divide_unit(self, module: Module, stage: int) -> None:
        parts, is_own = list(module.modules()), stage == self._dims.stage
        tensors = _tensors_of(parts)
        has_values = not any(tensor.is_meta for tensor in tensors)
        if self._deferred is not None and not has_values and is_own:
            self._deferred.fill(parts)
        if is_own:
            self._place(parts)
        if has_values:  # on all ranks, of which only the first may have loaded them
            self._share(_tensors_of(parts), None)
        elif is_own:
            self._share(_tensors_of(parts), self._dims.stage_group())
        if is_own and self._shards is not None:
            self._shards.shard(module, parts)
        if is_own:
            self.owner.update(dict.fromkeys(module.parameters(), stage))
        else:
            self._free(parts, stage)

    def _place(self, parts: Iterable[Module]) -> None:
        for tensor in _tensors_of(parts):
            tensor.data = tensor.data.to(self._device)

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
                    self._originals[standing], self._standing[parameter] = parameter, standing
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
        source, group = self._dims.pipeline_ranks[stage], self._pipeline.values
        about: list[Any] = [None if value is None else (tuple(value.shape), value.dtype)]
        dist.broadcast_object_list(about, source, group=group)
        if about[0] is None:
            return None
        shape, dtype = about[0]
        if value is None:
            full = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            full = value.detach().to(self._device, copy=True)
        if full.numel():
            flat = full.contiguous().view(-1)
            dist.broadcast(flat.view(torch.uint8), source, group=group)
            full = flat.view(shape)
        return full

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Give the module its own parameters again, with the values of all stages. *Collective* unless `obstacle`.

        Args:
            obstacle: the reason why values are not fetched from other ranks, so that parameters stay sharded, and those
                of other stages without values; `None` if they are.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by the objects that stood for them.
        """
        unsharded: dict[Parameter, Parameter] = {}
        if self._shards is not None:
            unsharded = self._shards.restore(obstacle)
        if obstacle is not None:
            return {}
        self.owner = {unsharded.get(parameter, parameter): stage for parameter, stage in self.owner.items()}
        for parameter in self.owner:
            full = self.full(parameter, None if is_elsewhere(parameter) else parameter)
            if is_elsewhere(parameter):
                assert full is not None
                original = self._originals[parameter]
                if original.is_meta:
                    original = Parameter(full.cpu(), requires_grad=parameter.requires_grad)
                    vars(original).update(vars(self._originals[parameter]))
                    self._originals[parameter] = original
                else:
                    original.data = full.cpu()
                original.requires_grad_(parameter.requires_grad)
        for module in self._root.modules():
            own = own_parameters(module)
            for name, current in own.items():
                if current is not None and current in self._originals:
                    own[name] = self._originals[current]
        return unsharded | self._originals


def share_buffers(division: Division, pipeline: Pipeline) -> None:
    """Give all stages the buffers of the stage that computes them; those that are on all stages are the last stage's.

    Units may register buffers in a step, which only one stage runs, so the stage names those that it has. *Collective*
    over the pipeline.
    """
    root, dims, rank = division.units.root.module, pipeline.dims, dist.get_rank(pipeline.values)
    stage_of = {part: stage for module, stage in division.placed for part in module.modules()}
    own = {
        (name, attribute): (buffer.cpu(), attribute not in not_persistent(part))
        for name, part in root.named_modules()
        if stage_of.get(part, dims.stage) == dims.stage
        for attribute, buffer in own_buffers(part).items()
        if buffer is not None and not is_elsewhere(buffer)
    }
    done: set[tuple[str, str]] = set()
    for number, of_rank in enumerate(gather_objects(own, pipeline.values)):  # the last stage comes first
        for (name, attribute), (value, is_persistent) in of_rank.items() if number != rank else ():
            buffers = own_buffers(root.get_submodule(name))
            current = buffers.get(attribute)
            if (name, attribute) in done:
                continue
            if current is not None and current.shape == value.shape and not is_elsewhere(current):
                current.data.copy_(value)
            elif is_persistent:  # the stage has registered it, or replaced it with one of another shape, in a step
                buffers[attribute] = value.to(pipeline.device)
        done.update(of_rank)


def _tensors_of(parts: Iterable[Module]) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for tensor in (*own_parameters(part).values(), *own_buffers(part).values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
    return list(tensors.values())
