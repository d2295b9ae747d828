"""What code of the user's writes to parameters, brought to where DeepSpeed keeps them.

Target networks, moving averages, clamped or re-drawn weights: hooks and steps change parameters. All ranks run the same
code on whole values, and each takes over its part; nothing is sent for that. At stage 3 a parameter that is not in use
is gathered when it is touched.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.forward_stack import innermost_forward
from lightning_paral.compat.torch.storages import use_count
from lightning_paral.compat.torch.versions import version_of
from lightning_paral.engines.zero.parameters.watched import Partitioned, plain_data, replaced, unwatch, watch
from lightning_paral.errors import ConfigurationError

_KEPT_GATHERED = 4
"""Parameters of stage 3 that stay gathered after code of the user's touched them: what it does next is mostly to the
same ones. The number is the same on all ranks, for gathering anew is collective."""

_NOT_DIFFERENTIABLE = {Tensor.detach, torch.detach, Tensor.detach_}

Adopt = Callable[[list[tuple[Parameter, Tensor]]], None]
"""Takes over this rank's part of whole values that parameters were given."""


@dataclass
class _Copy:
    """Whole values of a parameter of stage 3, which code of the user's may hold, too."""

    parameter: Any
    values: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """Whether code of the user's has written to the values since they were taken or brought home."""
        return version_of(self.values) != self.version

    def follow(self, written: tuple[Any, Tensor] | None) -> None:
        """Take the values that the parameter was given by another copy, if it was given any."""
        if written is not None and written[1].data_ptr() != self.values.data_ptr():
            self.values.copy_(written[1])
        self.version = version_of(self.values)

    @property
    def is_held_elsewhere(self) -> bool:
        storage = use_count(self.values)
        # Its own count, that of this class, that of the argument; the storage, and the object that asks for it.
        return bool(sys.getrefcount(self.values) > 2 or storage > 2)


class Writes:
    """The parameters of `module` while a run under ZeRO lasts.

    Args:
        module: whose parameters are watched.
        adopt: takes over what was written to them.
        hides_gradients: whether reading `.grad` of a parameter that is trained is an error.
    """

    def __init__(self, module: Module, adopt: Adopt, *, hides_gradients: bool) -> None:
        self.hides_gradients = hides_gradients
        self._adopt = adopt
        named = [pair for pair in module.named_parameters() if type(pair[1]).__torch_function__ is _PLAIN]
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._versions = {id(parameter): version_of(parameter) for parameter in self._parameters}
        self._lent: dict[int, Any] = {}
        self._gathered: dict[int, _Copy] = {}
        self._aliased: list[_Copy] = []
        self._methods: list[tuple[Any, dict[str, Any]]] = []
        for parameter in self._parameters:
            if hasattr(parameter, "ds_id"):
                self._follow_engine(parameter)
            watch(parameter, self)

    def end(self, *, settle: bool) -> None:
        """Watch no more, having brought home what was written if `settle`."""
        if settle:
            self.settle()
        for parameter in self._parameters:
            unwatch(parameter)
        for parameter, methods in self._methods:
            vars(parameter).update(methods)
        self._parameters, self._lent, self._gathered, self._aliased = [], {}, {}, []

    def name_of(self, parameter: Any) -> str:
        """Return the name of `parameter` in the module."""
        return self._names[id(parameter)]

    # What code of the user's does

    def lend(self, parameter: Any) -> Tensor:
        """Return the whole values, which may be written to. *Collective* if the parameter is partitioned."""
        if isinstance(parameter, Partitioned):
            (values,) = self._values_of([parameter])
            self._let_go()
            return values
        if not hasattr(parameter, "ds_id"):
            self._lent[id(parameter)] = parameter
            return plain_data(parameter)
        self._settle_if_written(self._aliased)
        values = plain_data(parameter)  # at the next step DeepSpeed gives the parameter other memory
        self._aliased.append(_Copy(parameter, values, version_of(values)))
        return values

    def assign(self, parameter: Any, values: Tensor) -> None:
        """Give `parameter` other values, in place: those of `parameter.data = values`. *Collective* if partitioned.

        Raises:
            ConfigurationError: they have another shape or dtype.
        """
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if tuple(values.shape) != shape or values.dtype != parameter.dtype:
            raise ConfigurationError(
                f"{self.name_of(parameter)!r} has shape {shape} and dtype {parameter.dtype}, and was given values of "
                f"shape {tuple(values.shape)} and dtype {values.dtype} in a hook or step. ZeRO divides what was there "
                "when the run began: change shapes and dtypes before trainer.fit."
            )
        with torch.no_grad():
            self.lend(parameter).copy_(values)

    def copy_of(self, parameter: Any) -> Tensor:
        """Return a copy of the whole values.

        Raises:
            ConfigurationError: at stage 3, where a copy of a module would share DeepSpeed's hooks with it.
        """
        if hasattr(parameter, "ds_id"):
            raise ConfigurationError(
                f"{self.name_of(parameter)!r} was copied, by copy.deepcopy or pickle, during a run under ZeRO stage 3, "
                "which cannot copy modules. Copy them in __init__ or configure_model, or read parameters by "
                "self.trainer.strategy.full_parameter(parameter)."
            )
        return plain_data(parameter).clone()

    def run(self, func: Callable[..., Any], parameters: list[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call `func` with whole values in the place of partitioned parameters. *Collective* over the world."""
        if self._is_differentiated(func, parameters):
            self._gather_for_backward(parameters)
            return func(*args, **kwargs)
        values = {id(p): v for p, v in zip(parameters, self._values_of(parameters), strict=True)}
        result = func(*replaced(args, lambda p: values[id(p)]), **replaced(kwargs, lambda p: values[id(p)]))
        for parameter in parameters:
            if result is values[id(parameter)] and func not in _NOT_DIFFERENTIABLE:
                result = parameter  # of an operation in place
        values.clear()
        self._let_go()
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

    def _values_of(self, parameters: list[Any]) -> list[Tensor]:
        self._settle_if_written(self._aliased)
        missing = [parameter for parameter in parameters if id(parameter) not in self._gathered]
        if missing:
            self._check_not_in_flight(missing)
            missing[0].all_gather(param_list=missing)
            for parameter in missing:
                values = plain_data(parameter).detach()
                if values.data_ptr() == parameter.ds_tensor.data_ptr():  # in a world of one
                    values = values.clone()
                self._gathered[id(parameter)] = _Copy(parameter, values, version_of(values))
            missing[0].partition(param_list=missing)
        for parameter in parameters:
            self._gathered[id(parameter)] = self._gathered.pop(id(parameter))  # touched last
        return [self._gathered[id(parameter)].values for parameter in parameters]

    def _check_not_in_flight(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.ds_status.name == "INFLIGHT":
                raise ConfigurationError(
                    f"{self.name_of(parameter)!r} was used outside of its module while DeepSpeed is gathering it ahead "
                    "of use. Use it inside its module or in a hook, or set ParalZeROStrategy(gather_bucket_numel=0)."
                )

    def _let_go(self) -> None:
        """Bring home what was written to all but the copies touched last, and drop them."""
        for key in list(self._gathered)[:-_KEPT_GATHERED]:
            self._drop(self._gathered.pop(key))

    def _drop(self, copy: _Copy) -> None:
        self._aliased.append(copy)  # what is written to it later counts, too
        self._settle_if_written([copy])
        self._aliased = [each for each in self._aliased if each.is_held_elsewhere]

    # Bringing home

    def settle(self) -> None:
        """Bring home all that was written, at once: DeepSpeed publishes parameters together. No collective."""
        whole = [p for p in self._parameters if not isinstance(p, Partitioned) and self._is_written(p)]
        copies = [copy for copy in (*self._aliased, *self._gathered.values()) if copy.is_written]
        written = {id(p): (p, plain_data(p)) for p in whole} | {
            id(c.parameter): (c.parameter, c.values) for c in copies
        }
        if written:
            with torch.no_grad():
                self._adopt(list(written.values()))
                for copy in (*self._aliased, *self._gathered.values()):
                    copy.follow(written.get(id(copy.parameter)))
        for parameter, _ in written.values():
            self._lent.pop(id(parameter), None)
            self._versions[id(parameter)] = version_of(parameter)
        self._aliased = [copy for copy in self._aliased if copy.is_held_elsewhere]

    def settle_gathered(self) -> None:
        """Bring home what was written to copies of partitioned parameters, if anything was."""
        if any(hasattr(parameter, "ds_id") for parameter in self._parameters[:1]):
            self.settle()

    def adopt_by(self, adopt: Adopt) -> None:
        """Let `adopt` take over what is written from now on."""
        self._adopt = adopt

    def forget(self, concerns: Callable[[Any], bool]) -> None:
        """Let go of copies that a step has made outdated; `concerns` says which parameters its optimizer trains."""

        def is_old(copy: _Copy) -> bool:
            return copy.parameter.requires_grad and concerns(copy.parameter)

        copies = [*self._aliased, *self._gathered.values()]
        self._gathered = {}
        self._aliased = [copy for copy in copies if not is_old(copy) and copy.is_held_elsewhere]

    def accept(self) -> None:
        """Take what the parameters hold now for what DeepSpeed keeps: a checkpoint was loaded."""
        self._lent = {}
        self._gathered, self._aliased = {}, []
        for parameter in self._parameters:
            self._versions[id(parameter)] = version_of(parameter)

    def _is_written(self, parameter: Any) -> bool:
        return id(parameter) in self._lent or version_of(parameter) != self._versions[id(parameter)]

    def _settle_if_written(self, copies: Iterable[_Copy]) -> None:
        if any(copy.is_written for copy in copies):
            self.settle()

    # DeepSpeed's own coming and going, at stage 3

    def _follow_engine(self, parameter: Any) -> None:
        names = ("all_gather", "all_gather_coalesced", "partition")
        methods = {name: getattr(parameter, name) for name in names}
        self._methods.append((parameter, methods))
        for name in names[:2]:
            setattr(parameter, name, self._after(self._before_gathering, parameter, methods[name]))
        setattr(parameter, names[2], self._after(self._before_release, parameter, methods[names[2]]))

    def _after(self, prepare: Callable[[list[Any]], None], parameter: Any, method: Callable[..., Any]) -> Any:
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
        self._settle_if_written(self._aliased)

    def _before_release(self, parameters: list[Any]) -> None:
        self._settle_if_written(self._aliased)
        here = [p for p in parameters if id(p) in self._versions and not isinstance(p, Partitioned)]
        if any(self._is_written(parameter) for parameter in here):
            self.settle()


_PLAIN: Any = Parameter.__torch_function__
