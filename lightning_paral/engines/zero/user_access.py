"""What user code does with the parameters of a run: it reads full values, and what it writes reaches the weights.

DeepSpeed stores the values that it trains elsewhere: in fp32 master copies, and at stage 3 in each rank's shard, which
leaves an empty tensor in place of a parameter that is not in use. During a run, classes of this file replace
`torch.nn.Parameter`. They use no memory, and cost no time if only the forward passes of modules use a parameter:

- At stage 3 a partitioned parameter that user code uses is gathered, and stays gathered until a *boundary*: the start
  of the next step, an optimizer step, a save, or the end of the run. In hooks, those that were gathered first are
  partitioned before, if there are too many.
- At a boundary, and when a parameter is partitioned, the values of parameters that user code may have written to are
  compared with those that DeepSpeed stores, and what differs is copied. All ranks run the same user code on full
  values, so that each rank copies its shard without communication.
- Reading `.grad`, which is not where gradients are, is an error.
"""

import sys
import zlib
from collections.abc import Callable, Collection
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.stage3 import innermost_forward
from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass, version_of
from lightning_paral.compat.torch.tensors import tree_leaves, use_count
from lightning_paral.engines.zero.partition import full_numel, full_shape, is_partitioned, is_stage3_parameter
from lightning_paral.errors import ConfigurationError, ParalError

WriteBack = Callable[[list[tuple[Parameter, Tensor]]], None]
"""A function that takes parameters with full values, and copies this rank's shards of what differs to the weights."""

_data: Any = Tensor.data
_grad: Any = Tensor.grad
_NOT_DIFFERENTIABLE = {Tensor.detach, torch.detach, Tensor.detach_}
# These need no values, so they run on a partitioned parameter without gathering it.
_METADATA_FUNCTIONS = {
    getattr(Tensor, attribute).__get__
    for attribute in ("requires_grad", "device", "dtype", "is_leaf", "layout", "is_cuda", "is_meta")
} | {
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.is_floating_point, Tensor.is_complex),  # type: ignore[attr-defined]
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
}
# These run on a meta tensor of the full shape.
_SHAPE_FUNCTIONS = {getattr(Tensor, attribute).__get__ for attribute in ("shape", "ndim")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.element_size, torch.numel),
}


class HiddenGradientError(ParalError, RuntimeError):
    """User code read or set `parameter.grad`, which ZeRO does not use."""


class UserAccess:
    """Lets user code use the parameters of `module` as in one process, from construction to `end`.

    Args:
        module: the module.
        write_back: copies what user code has written to where DeepSpeed stores the weights.
        hides_gradients: whether reading `.grad` of a trained parameter is an error.
        max_live: how many elements may stay gathered for hooks. One operation may need more.
    """

    def __init__(self, module: Module, write_back: WriteBack, *, hides_gradients: bool, max_live: int) -> None:
        self.hides_gradients = hides_gradients
        self.max_live = max_live
        self.write_back = write_back
        named = [pair for pair in module.named_parameters() if type(pair[1]).__torch_function__ is _PLAIN]
        self.names = {id(parameter): name for name, parameter in named}
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._is_stage3 = any(map(is_stage3_parameter, self._parameters))
        self._versions: dict[int, tuple[int, int]] = {}
        self._exposed: set[int] = set()
        """The ids of parameters whose `data` user code has read since the last boundary."""
        self._gathered: dict[int, Any] = {}
        """The partitioned parameters that were gathered for user code."""
        self._handed_out: dict[int, Tensor] = {}
        """The full values that user code has got as `data`, by the `id` of the parameter. What it got are aliases,
        which share the version of these, but not that of the parameter."""
        self._kept: dict[int, list[_Kept]] = {}
        """The former memory of parameters that user code may still write to, by the address of the storage."""
        self._plain_partition: list[tuple[Any, Any]] = []
        self.mark_unwritten()
        for parameter in self._parameters:
            if is_stage3_parameter(parameter):
                self._plain_partition.append((parameter, parameter.partition))
                parameter.partition = self._compare_before(parameter, parameter.partition)
            parameter._access = self
            plain_class: type[Parameter] = type(parameter)
            full, gathered, partitioned = _classes(plain_class)
            is_whole = not is_stage3_parameter(parameter)
            parameter.__class__ = full if is_whole else partitioned if is_partitioned(parameter) else gathered

    def end(self, *, collect: bool) -> None:
        """Make the parameters ordinary ones again. With `collect`, copy what user code has written first."""
        try:
            if collect:
                self.collect()
        finally:
            for parameter in self._parameters:
                parameter.__class__ = parameter.plain_class
                del parameter._access
            for parameter, partition in self._plain_partition:
                parameter.partition = partition
            self._parameters, self._plain_partition, self._gathered = [], [], {}
            self._handed_out, self._kept = {}, {}

    # Used by the classes below

    def gather(self, parameters: list[Any], *, differentiated: bool, used: Collection[int] = ()) -> None:
        """Gather partitioned parameters for user code. *Collective* over the world.

        Args:
            parameters: the parameters.
            differentiated: whether their gradients are needed: DeepSpeed then gathers them for the backward pass.
            used: the ids of parameters that must stay gathered.
        """
        from deepspeed.runtime.zero import register_external_parameter

        self.remember_kept()
        self._refuse_written([each for each in parameters if self._has_new_version(each)])
        if innermost_forward() is None:
            self._make_room(sum(map(full_numel, parameters)), used)
        for parameter in parameters:
            if parameter.ds_status.name == "INFLIGHT":
                raise ConfigurationError(
                    f"{self.names[id(parameter)]!r} was used outside of its module while DeepSpeed was gathering it in "
                    "advance. Use it inside its module or in a hook, or set ParalZeROStrategy(gather_bucket_numel=0)."
                )
            if differentiated:
                register_external_parameter(innermost_forward(), parameter)
            else:
                self._gathered[id(parameter)] = parameter
        parameters[0].all_gather(param_list=parameters)

    def _make_room(self, num_elements: int, used: Collection[int]) -> None:
        """Partition what was gathered first, so that `num_elements` more can be gathered: on all ranks the same."""
        gathered = [p for p in self._gathered.values() if not isinstance(p, Partitioned)]
        num_elements += sum(map(full_numel, gathered))
        released = []
        for parameter in gathered:
            if num_elements > self.max_live and id(parameter) not in used and not parameter.ds_active_sub_modules:
                num_elements -= full_numel(parameter)
                released.append(self._gathered.pop(id(parameter)))
        if released:
            released[0].partition(param_list=released)
            self.remember_kept()

    def expose(self, parameter: Any) -> Tensor:
        """Return `parameter.data` for user code, which may write to it. *Collective* if it is partitioned."""
        if isinstance(parameter, Partitioned):
            self.gather([parameter], differentiated=False)
        self._exposed.add(id(parameter))
        return self._handed_out.setdefault(id(parameter), plain_data(parameter)).detach()

    def assign(self, parameter: Any, values: Tensor) -> None:
        """Copy `values` into `parameter`, for `parameter.data = values`. *Collective* if it is partitioned.

        Raises:
            ConfigurationError: they have another shape or dtype.
        """
        shape = full_shape(parameter)
        if tuple(values.shape) != shape or values.dtype != parameter.dtype:
            raise ConfigurationError(
                f"{self.names[id(parameter)]!r} has shape {shape} and dtype {parameter.dtype}, and was given "
                f"values of shape {tuple(values.shape)} and dtype {values.dtype} in a hook or step. ZeRO shards "
                "parameters when the run begins: change shapes and dtypes before trainer.fit."
            )
        with torch.no_grad():
            self.expose(parameter).copy_(values)

    def copy(self, parameter: Any) -> Parameter:
        """Return an ordinary parameter with the same values.

        Raises:
            ConfigurationError: at stage 3, where a copy of a module would share DeepSpeed's hooks with the module.
        """
        if is_stage3_parameter(parameter):
            raise ConfigurationError(
                f"{self.names[id(parameter)]!r} was copied, by copy.deepcopy or pickle, during a run under ZeRO "
                "stage 3, which cannot copy modules. Copy them in __init__ or configure_model, or read parameters with "
                "self.trainer.strategy.full_parameter(parameter)."
            )
        return Parameter(plain_data(parameter).clone(), parameter.requires_grad)

    # Boundaries

    def collect(self) -> None:
        """Copy what user code has written, and partition what was gathered for it. No communication."""
        if not self._is_stage3:
            if any(map(self._may_be_written, self._parameters)):
                self._take(self._parameters)
            return
        gathered = [parameter for parameter in self._gathered.values() if not is_partitioned(parameter)]
        self._gathered = {}
        self._take([p for p in self._parameters if not isinstance(p, Partitioned) and self._may_be_written(p)])
        to_release = [parameter for parameter in gathered if not parameter.ds_active_sub_modules]
        if to_release:
            to_release[0].partition(param_list=to_release)
        self._check_kept()

    def mark_unwritten(self) -> None:
        """Treat the current values of parameters as those that DeepSpeed stores, as after loading a checkpoint."""
        self._exposed.clear()
        self._versions = {id(parameter): self._version(parameter) for parameter in self._parameters}

    def _may_be_written(self, parameter: Any) -> bool:
        return id(parameter) in self._exposed or self._has_new_version(parameter)

    def _has_new_version(self, parameter: Any) -> bool:
        return self._version(parameter) != self._versions[id(parameter)]

    def _version(self, parameter: Any) -> tuple[int, int]:
        """Return the version of the parameter and that of its `data`, which user code may have kept."""
        handed_out = self._handed_out.get(id(parameter))
        return version_of(parameter), 0 if handed_out is None else version_of(handed_out)

    def _take(self, parameters: list[Any]) -> None:
        if parameters:
            with torch.no_grad():
                self.write_back([(parameter, plain_data(parameter)) for parameter in parameters])
            for parameter in parameters:
                self._exposed.discard(id(parameter))
                self._versions[id(parameter)] = self._version(parameter)

    def _compare_before(self, parameter: Any, partition: Callable[..., Any]) -> Any:
        """Return `partition`, the method of a parameter of stage 3, with a comparison before it."""

        def compare_and_partition(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            parameters = [each for each in param_list or [parameter] if not is_partitioned(each)]
            self._take([each for each in parameters if self._may_be_written(each)])
            former = [(each, self._handed_out.pop(id(each), plain_data(each))) for each in parameters]
            for each, _ in former:
                self._versions[id(each)] = self._version(each)
            result = partition(param_list, *args, **kwargs)
            while former:
                kept = _Kept(*former.pop())
                self._kept.setdefault(kept.address, []).append(kept)
                self._drop_unshared(kept.address)
            return result

        return compare_and_partition

    def remember_kept(self) -> None:
        """Remember the values of tensors of user code that no longer share memory with a parameter.

        It is called before user code may write to them: after what partitions parameters.
        """
        for address in list(self._kept):
            self._drop_unshared(address)
        for entries in self._kept.values():
            for kept in entries:
                kept.remember()

    def _drop_unshared(self, address: int) -> None:
        """Forget the former memory at `address` if only parameters had it, which were gathered into one storage."""
        if use_count(self._kept[address][0].values) - 1 <= len(self._kept[address]):
            del self._kept[address]

    def _check_kept(self) -> None:
        """Raise a `ConfigurationError` if user code has written to a tensor that was a parameter before."""
        self.remember_kept()
        with DisableTorchFunctionSubclass():
            written = [p for p in self._parameters if isinstance(p, Partitioned) and self._has_new_version(p)]
        written += [kept.parameter for entries in self._kept.values() for kept in entries if kept.is_written()]
        self._refuse_written(written)

    def _refuse_written(self, written: list[Any]) -> None:
        if written:
            raise ConfigurationError(
                f"A tensor was written to that had shared memory with {self.names[id(written[0])]!r} in an earlier "
                "hook or step, or before other parameters were used. Under ZeRO stage 3 the parameter has other memory "
                "since. Use the parameter itself each time, or train with paral_zero2 or paral_fsdp."
            )


class _Kept:
    """Former memory of a parameter of stage 3.

    User code may still have aliases of it. Those that it got as `data` share the version of `values`, others, as from
    `detach`, that of the parameter, whose own values are written under the same version.

    Args:
        parameter: the parameter, which is partitioned now.
        values: its former values.
    """

    def __init__(self, parameter: Any, values: Tensor) -> None:
        self.parameter = parameter
        self.values = values
        self.address = values.untyped_storage().data_ptr()
        self._version = version_of(values)
        self._parameter_version = version_of(parameter)
        self._checksum: int | None = None

    def remember(self) -> None:
        """Remember the current values, at the first call."""
        if self._checksum is None:
            self._parameter_version = version_of(self.parameter)
            self._checksum = self._compute_checksum()

    def is_written(self) -> bool:
        """Return whether user code has written to the memory since it was remembered."""
        if version_of(self.values) != self._version:
            return True
        if version_of(self.parameter) == self._parameter_version:
            return False
        return self._checksum != self._compute_checksum()

    def _compute_checksum(self) -> int:
        if self.address == self.parameter.ds_tensor.untyped_storage().data_ptr():
            return 0  # with one rank the memory is the shard, which DeepSpeed writes to, and the parameter again later
        raw: Any = self.values.reshape(-1).view(torch.uint8).cpu().numpy()
        return zlib.crc32(raw)


class Full:
    """Mixin for a parameter whose `data` is full."""

    _access: UserAccess
    plain_class: type[Parameter]
    """The class that this one replaces."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an ordinary parameter, because one that user code creates is not part of the run."""
        return cls.plain_class(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The full values. User code may write to them."""
        return self._access.expose(self) if is_user_code() else plain_data(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, values: Tensor) -> None:
        if is_user_code():
            self._access.assign(self, values)
            return
        with DisableTorchFunctionSubclass():
            _data.__set__(self, values)

    @property
    def grad(self) -> Tensor | None:
        """The gradient. User code that reads it gets an error if the parameter is trained."""
        if self.requires_grad and self._access.hides_gradients and is_user_code():  # type: ignore[attr-defined]
            raise HiddenGradientError(
                f"parameter.grad of {self._access.names[id(self)]!r} was read, but under ZeRO gradients are sharded, "
                "and not in parameter.grad. Read full gradients with `self.trainer.strategy.full_gradient(parameter)`, "
                "read their norm with `self.trainer.strategy.gradient_norm()`, clip them with "
                "`self.clip_gradients(optimizer, ...)`, and zero them with `optimizer.zero_grad()`."
            )
        with DisableTorchFunctionSubclass():
            gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self._access.hides_gradients and is_user_code():
            raise HiddenGradientError(
                f"parameter.grad of {self._access.names[id(self)]!r} was set in a hook or step, but under ZeRO "
                "gradients are sharded, and not in parameter.grad: the optimizer would not use it. Change the loss "
                "instead, or train with paral_fsdp or paral_ddp."
            )
        with DisableTorchFunctionSubclass():
            _grad.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        with DisableTorchFunctionSubclass():
            _grad.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._access.copy(self)
        copied: Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._access.copy(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Gathered(Full):
    """Mixin for a parameter of stage 3 that is gathered now."""

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's status of the parameter: gathered, being gathered, or partitioned."""
        return self.__dict__["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        self.__dict__["ds_status"] = status
        _, gathered, partitioned = _classes(self.plain_class)
        self.__class__ = gathered if status.name == "AVAILABLE" else partitioned


class Partitioned(Gathered):
    """Mixin for a parameter of stage 3 of which this rank has only its shard now.

    An operation of user code gathers it first. *Collective* over the world.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS or not is_user_code():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SHAPE_FUNCTIONS:
            shape = torch.empty(full_shape(args[0]), dtype=args[0].dtype, device="meta")
            return func(shape, *args[1:], **kwargs)
        used: dict[int, Any] = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Gathered)}
        parameters: list[Any] = [parameter for parameter in used.values() if isinstance(parameter, Partitioned)]
        trained = any(parameter.requires_grad for parameter in parameters)
        is_differentiated = trained and torch.is_grad_enabled() and func not in _NOT_DIFFERENTIABLE
        is_differentiated = is_differentiated and innermost_forward() is not None
        parameters[0]._access.gather(parameters, differentiated=is_differentiated, used=used)
        return func(*args, **kwargs)


@cache
def _classes(plain_class: type[Parameter]) -> tuple[type, type, type]:
    """Return the classes that replace `plain_class`: at stages 1 and 2, and gathered and partitioned at stage 3."""
    members = {"__module__": plain_class.__module__, "plain_class": plain_class}
    full, gathered, partitioned = (
        type(plain_class.__name__, (mixin, plain_class), dict(members)) for mixin in (Full, Gathered, Partitioned)
    )
    return full, gathered, partitioned


def plain_data(parameter: Parameter) -> Tensor:
    """Return `parameter.data`, as it is now."""
    with DisableTorchFunctionSubclass():
        values: Tensor = _data.__get__(parameter)
    return values


_ENGINE = ("deepspeed", "lightning_paral")


def is_user_code(depth: int = 2) -> bool:
    """Return whether the function `depth` frames up the stack is user code. Functions of torch are skipped.

    Functions of DeepSpeed and of this package are not user code. Those of Lightning are, because its callbacks act on
    parameters for the user.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package not in _ENGINE
        frame = frame.f_back
    return True


_PLAIN: Any = Parameter.__torch_function__
