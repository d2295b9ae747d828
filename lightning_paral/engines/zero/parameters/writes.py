"""When user code writes to parameters, copy the new values to where DeepSpeed stores them.

Hooks and steps write to parameters: target networks, moving averages, clamped or re-initialized weights. All ranks run
the same code on full values, and each rank copies its shard, without communication. At stage 3 a parameter that is not
in use is gathered when user code accesses it.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.stage3 import innermost_forward
from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.tensors import use_count
from lightning_paral.engines.zero.parameters.partition import full_shape, is_stage3_parameter
from lightning_paral.engines.zero.parameters.watched import Partitioned, plain_data, replace_partitioned, unwatch, watch
from lightning_paral.errors import ConfigurationError

_NUM_KEPT_COPIES = 4
"""The number of full copies of stage-3 parameters that are kept, because user code often accesses the same parameters
again. It is the same on all ranks, because gathering is collective."""

_NOT_DIFFERENTIABLE = {Tensor.detach, torch.detach, Tensor.detach_}

WriteBack = Callable[[list[tuple[Parameter, Tensor]]], None]
"""A function that takes parameters with new full values, and copies this rank's shards to where they are stored."""


@dataclass
class _Copy:
    """A full copy of a parameter of stage 3. User code may keep a reference to it."""

    parameter: Any
    values: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """Whether user code has written to the copy since it was made or collected."""
        return version_of(self.values) != self.version

    def update(self, written: tuple[Any, Tensor] | None) -> None:
        """Copy the values that were written to another copy of the parameter, if any; mark this copy as collected."""
        if written is not None and written[1].data_ptr() != self.values.data_ptr():
            self.values.copy_(written[1])
        self.version = version_of(self.values)

    @property
    def is_used_elsewhere(self) -> bool:
        """Whether user code still has a reference to the tensor, or a view of it."""
        storage = use_count(self.values)
        # Without user code, both counts are 2. The tensor is referenced by this object and by the argument of
        # `getrefcount`; for the storage, see `use_count`.
        return bool(sys.getrefcount(self.values) > 2 or storage > 2)


class Writes:
    """Records what user code writes to the parameters of `module`, from construction to `end`.

    Args:
        module: the module whose parameters are watched.
        write_back: copies written values to where DeepSpeed stores them.
        hides_gradients: whether reading `.grad` of a trained parameter is an error.
    """

    def __init__(self, module: Module, write_back: WriteBack, *, hides_gradients: bool) -> None:
        self.hides_gradients = hides_gradients
        self._write_back = write_back
        named = [
            pair for pair in module.named_parameters() if type(pair[1]).__torch_function__ is _PLAIN_TORCH_FUNCTION
        ]
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._versions = {id(parameter): version_of(parameter) for parameter in self._parameters}
        self._exposed: dict[int, Any] = {}
        """Parameters whose `data` user code has read. Writes to it do not change the version of the parameter."""
        self._gathered: dict[int, _Copy] = {}
        """Full copies that are kept for the next access, the most recently used one at the end."""
        self._aliased: list[_Copy] = []
        """Other full copies to which user code may still write."""
        self._methods: list[tuple[Any, dict[str, Any]]] = []
        for parameter in self._parameters:
            if is_stage3_parameter(parameter):
                self._wrap_engine_methods(parameter)
            watch(parameter, self)

    def end(self, *, collect: bool) -> None:
        """Stop watching. With `collect`, write back recorded values first."""
        if collect:
            self.collect()
        for parameter in self._parameters:
            unwatch(parameter)
        for parameter, methods in self._methods:
            vars(parameter).update(methods)
        self._parameters, self._exposed, self._gathered, self._aliased = [], {}, {}, []

    def parameter_name(self, parameter: Any) -> str:
        """Return the name of `parameter` in the module."""
        return self._names[id(parameter)]

    # Accesses by user code

    def full_data(self, parameter: Any) -> Tensor:
        """Return the full values. User code may write to them. *Collective* if the parameter is partitioned."""
        if isinstance(parameter, Partitioned):
            (values,) = self._full_values([parameter])
            self._drop_old_copies()
            return values
        if not is_stage3_parameter(parameter):
            self._exposed[id(parameter)] = parameter
            return plain_data(parameter)
        self._collect_if_written(self._aliased)
        values = plain_data(parameter)  # DeepSpeed replaces this memory in the next step
        self._aliased.append(_Copy(parameter, values, version_of(values)))
        return values

    def assign(self, parameter: Any, values: Tensor) -> None:
        """Copy `values` into `parameter`, for `parameter.data = values`. *Collective* if it is partitioned.

        Raises:
            ConfigurationError: they have another shape or dtype.
        """
        shape = full_shape(parameter)
        if tuple(values.shape) != shape or values.dtype != parameter.dtype:
            raise ConfigurationError(
                f"{self.parameter_name(parameter)!r} has shape {shape} and dtype {parameter.dtype}, and was given "
                f"values of shape {tuple(values.shape)} and dtype {values.dtype} in a hook or step. ZeRO shards "
                "parameters when the run begins: change shapes and dtypes before trainer.fit."
            )
        with torch.no_grad():
            self.full_data(parameter).copy_(values)

    def full_copy(self, parameter: Any) -> Tensor:
        """Return a copy of the full values.

        Raises:
            ConfigurationError: at stage 3, where a copy of a module would share DeepSpeed's hooks with the module.
        """
        if is_stage3_parameter(parameter):
            raise ConfigurationError(
                f"{self.parameter_name(parameter)!r} was copied, by copy.deepcopy or pickle, during a run under ZeRO "
                "stage 3, which cannot copy modules. Copy them in __init__ or configure_model, or read parameters with "
                "self.trainer.strategy.full_parameter(parameter)."
            )
        return plain_data(parameter).clone()

    def run(self, func: Callable[..., Any], parameters: list[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call `func` with full values in place of partitioned parameters. *Collective* over the world."""
        if self._is_differentiated(func, parameters):
            self._gather_for_backward(parameters)
            return func(*args, **kwargs)
        values = {id(p): v for p, v in zip(parameters, self._full_values(parameters), strict=True)}
        result = func(
            *replace_partitioned(args, lambda p: values[id(p)]), **replace_partitioned(kwargs, lambda p: values[id(p)])
        )
        for parameter in parameters:
            if result is values[id(parameter)] and func not in _NOT_DIFFERENTIABLE:
                result = parameter  # the operation was in place
        values.clear()
        self._drop_old_copies()
        return result

    def _is_differentiated(self, func: Callable[..., Any], parameters: list[Any]) -> bool:
        in_forward = innermost_forward() is not None
        trained = any(parameter.requires_grad for parameter in parameters)
        return in_forward and trained and torch.is_grad_enabled() and func not in _NOT_DIFFERENTIABLE

    def _gather_for_backward(self, parameters: list[Any]) -> None:
        from deepspeed.runtime.zero import register_external_parameter

        self._check_not_in_flight(parameters)
        for parameter in parameters:
            register_external_parameter(innermost_forward(), parameter)
        parameters[0].all_gather(param_list=parameters)

    # Gathering

    def _full_values(self, parameters: list[Any]) -> list[Tensor]:
        self._collect_if_written(self._aliased)
        missing = [parameter for parameter in parameters if id(parameter) not in self._gathered]
        if missing:
            self._check_not_in_flight(missing)
            missing[0].all_gather(param_list=missing)
            for parameter in missing:
                values = plain_data(parameter).detach()
                if values.data_ptr() == parameter.ds_tensor.data_ptr():  # with a single rank
                    values = values.clone()
                self._gathered[id(parameter)] = _Copy(parameter, values, version_of(values))
            missing[0].partition(param_list=missing)
        for parameter in parameters:
            self._gathered[id(parameter)] = self._gathered.pop(id(parameter))  # now the most recently used
        return [self._gathered[id(parameter)].values for parameter in parameters]

    def _check_not_in_flight(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.ds_status.name == "INFLIGHT":
                raise ConfigurationError(
                    f"{self.parameter_name(parameter)!r} was used outside of its module while DeepSpeed was gathering "
                    "it in advance. Use it inside its module or in a hook, or set "
                    "ParalZeROStrategy(gather_bucket_numel=0)."
                )

    def _drop_old_copies(self) -> None:
        """Drop all copies except the most recently used ones, after collecting from them."""
        for key in list(self._gathered)[:-_NUM_KEPT_COPIES]:
            self._drop(self._gathered.pop(key))

    def _drop(self, copy: _Copy) -> None:
        self._aliased.append(copy)  # later writes to it are collected as well
        self._collect_if_written([copy])
        self._aliased = [each for each in self._aliased if each.is_used_elsewhere]

    # Collecting

    def collect(self) -> None:
        """Write back all recorded values at once, because DeepSpeed updates parameters together. No collective."""
        here = [p for p in self._parameters if not isinstance(p, Partitioned) and self._is_written(p)]
        copies = [copy for copy in (*self._aliased, *self._gathered.values()) if copy.is_written]
        written = {id(p): (p, plain_data(p)) for p in here} | {id(c.parameter): (c.parameter, c.values) for c in copies}
        if written:
            with torch.no_grad():
                self._write_back(list(written.values()))
                for copy in (*self._aliased, *self._gathered.values()):
                    copy.update(written.get(id(copy.parameter)))
        for parameter, _ in written.values():
            self._exposed.pop(id(parameter), None)
            self._versions[id(parameter)] = version_of(parameter)
        self._aliased = [copy for copy in self._aliased if copy.is_used_elsewhere]

    def collect_from_copies(self) -> None:
        """Write back recorded values at stage 3, where user code writes to copies of parameters."""
        if any(is_stage3_parameter(parameter) for parameter in self._parameters[:1]):
            self.collect()

    def set_write_back(self, write_back: WriteBack) -> None:
        """Use `write_back` to write values back from now on."""
        self._write_back = write_back

    def drop_outdated(self, covers: Callable[[Any], bool]) -> None:
        """Drop copies that a step has made outdated. `covers` tells whether the optimizer trains a parameter."""

        def is_old(copy: _Copy) -> bool:
            return copy.parameter.requires_grad and covers(copy.parameter)

        copies = [*self._aliased, *self._gathered.values()]
        self._gathered = {}
        self._aliased = [copy for copy in copies if not is_old(copy) and copy.is_used_elsewhere]

    def mark_unwritten(self) -> None:
        """Treat the current values of parameters as those that DeepSpeed stores, as after loading a checkpoint."""
        self._exposed = {}
        self._gathered, self._aliased = {}, []
        for parameter in self._parameters:
            self._versions[id(parameter)] = version_of(parameter)

    def _is_written(self, parameter: Any) -> bool:
        return id(parameter) in self._exposed or version_of(parameter) != self._versions[id(parameter)]

    def _collect_if_written(self, copies: Iterable[_Copy]) -> None:
        if any(copy.is_written for copy in copies):
            self.collect()

    # At stage 3, DeepSpeed itself gathers and partitions parameters

    def _wrap_engine_methods(self, parameter: Any) -> None:
        names = ("all_gather", "all_gather_coalesced", "partition")
        methods = {name: getattr(parameter, name) for name in names}
        self._methods.append((parameter, methods))
        for name in names[:2]:
            setattr(parameter, name, self._call_before(self._before_gathering, parameter, methods[name]))
        setattr(parameter, names[2], self._call_before(self._before_partitioning, parameter, methods[names[2]]))

    def _call_before(self, prepare: Callable[[list[Any]], None], parameter: Any, method: Callable[..., Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            parameters = kwargs.get("param_list") or kwargs.get("params") or (args[0] if args else None)
            prepare([parameter] if parameters is None else list(parameters))
            return method(*args, **kwargs)

        return run

    def _before_gathering(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            copy = self._gathered.pop(id(parameter), None)
            if copy is not None:
                self._drop(copy)
        self._collect_if_written(self._aliased)

    def _before_partitioning(self, parameters: list[Any]) -> None:
        self._collect_if_written(self._aliased)
        here = [p for p in parameters if id(p) in self._versions and not isinstance(p, Partitioned)]
        if any(self._is_written(parameter) for parameter in here):
            self.collect()


_PLAIN_TORCH_FUNCTION: Any = Parameter.__torch_function__
