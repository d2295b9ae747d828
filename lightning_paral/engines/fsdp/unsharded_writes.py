"""Copy values written to unsharded parameters into the shards, before the parameters are resharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.compat.checks import check_instance
from lightning_paral.compat.torch import fsdp
from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.engines.fsdp.data_assignment import check_assigned
from lightning_paral.engines.fsdp.guards import refuse_hook
from lightning_paral.engines.fsdp.local_rows import own_chunk, shard_like
from lightning_paral.engines.fsdp.parameter_hooks import ParameterHooks
from lightning_paral.errors import ConfigurationError

_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad


class UnshardedParameter(Parameter):
    """An unsharded parameter that detects writes to its values.

    In-place operations increment its version. In-place operations on a tensor that `data` returned increment
    the version of that tensor.
    """

    _name: str
    _is_of_another: Callable[[Tensor, Tensor], bool]
    _sharded: Callable[[], Any]
    _register_hook: Callable[[bool, Any], Any]
    _gathered: Tensor
    _seen: int
    _alias: Tensor | None = None
    _assigned = False

    @property
    def data(self) -> Tensor:
        """The values, without autograd."""
        if self._alias is None:
            self._alias = _DATA.__get__(self)
        return self._alias.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, DTensor):
            raise ConfigurationError(
                f"{self._name}.data was assigned a sharded tensor (a DTensor) while the parameter is unsharded: in a "
                "step, or in a method of its unit. Assign it in a hook such as on_train_batch_end, where both are "
                "sharded."
            )
        check_assigned(self._name, self, value)
        if self._is_of_another(self, value):
            raise ConfigurationError(
                f"{self._name}.data was assigned the memory of another parameter. In one process, both parameters "
                "would then share it; under FSDP they cannot. Copy the values: parameter.data.copy_(...)."
            )
        _DATA.__set__(self, value.detach())
        self._alias, self._assigned = None, True

    @property
    def grad(self) -> Tensor | None:
        """The gradient. Between a step and its backward pass, it is that of the shard, from the previous step."""
        own: Tensor | None = _GRAD.__get__(self)
        sharded = self._sharded()
        return own if own is not None or sharded is None else sharded.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        sharded = self._sharded()
        if sharded is None:
            _GRAD.__set__(self, value)
        elif value is None or isinstance(value, DTensor):
            sharded.grad = value
        else:
            chunk = own_chunk(sharded)
            assert chunk is not None  # parameters that the user sharded are not watched
            sharded.grad = shard_like(sharded, value, chunk)

    @property
    def was_written(self) -> bool:
        """Whether its values may have been changed since it was unsharded."""
        aliased = self._alias is not None and version_of(self._alias) > 0
        return version_of(self) != self._seen or self._assigned or aliased

    def watch_again(self) -> None:
        """Restore the gathered memory, and treat the current values as those of the shards."""
        if self._assigned:
            _DATA.__set__(self, self._gathered)
        self._alias, self._assigned, self._seen = None, False, version_of(self)

    def register_hook(self, hook: Any) -> Any:
        """Register a hook that stays with the parameter after the run."""
        return self._register_hook(self.requires_grad, hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raise a `ConfigurationError`: the hook would see a `grad` that is not the one that is kept."""
        refuse_hook(self._name, "register_post_accumulate_grad_hook")

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            memo[id(self)] = Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        copied: Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class WatchedGroup:
    """Copies values written to the unsharded parameters of a unit into its shards, whenever the unit is resharded.

    Args:
        group: the `FSDPParamGroup` of the unit.
        is_of_another: returns whether its second argument shares memory with an unsharded parameter other than its
            first argument.
        in_hooks: returns whether a step has ended and its backward pass has not begun; hooks then see unsharded
            parameters.
        gradient_hooks: hooks on the gradients of parameters.
    """

    def __init__(
        self,
        group: Any,
        is_of_another: Callable[[Tensor, Tensor], bool],
        in_hooks: Callable[[], bool],
        gradient_hooks: ParameterHooks,
    ) -> None:
        self._group = group
        self._gradient_hooks = gradient_hooks
        self._in_hooks = in_hooks
        self._is_of_another = is_of_another
        self._watched: list[tuple[Any, UnshardedParameter]] = []
        self._split: list[tuple[Any, DTensor, tuple[int, int]]] = []
        """Parameters that stay split over tensor ranks, and their versions after they were unsharded."""
        self._began = False
        for part in (group, *group.fsdp_params[:1]):
            check_instance("torch", part)
        fsdp.watch(group, self._after_unshard, self._before_reshard)

    def shares_memory(self, param: Tensor, value: Tensor) -> bool:
        """Return whether `value` uses the memory of an unsharded parameter of this unit other than `param`."""
        start = value.untyped_storage().data_ptr()
        return start != 0 and any(
            unsharded is not param and unsharded._gathered.untyped_storage().data_ptr() == start
            for _, unsharded in self._watched
        )

    def _after_unshard(self) -> None:
        if self._began:  # FSDP2 creates the unsharded parameters only once
            return
        self._began = True
        params = self._group.fsdp_params
        self._watched = [(param, self._watch(param)) for param in params if fsdp.is_plain(param)]
        for param in params:
            unsharded = fsdp.unsharded_param(param)
            if isinstance(unsharded, DTensor):
                self._split.append((param, unsharded, _versions(unsharded)))
            self._gradient_hooks.attach(param)

    def _watch(self, param: Any) -> UnshardedParameter:
        unsharded: Any = fsdp.unsharded_param(param)
        unsharded.__class__ = UnshardedParameter
        unsharded._name, unsharded._is_of_another = str(fsdp.name_of(param)), self._is_of_another
        unsharded._sharded = lambda: param.sharded_param if self._in_hooks() else None
        unsharded._register_hook = partial(self._gradient_hooks.register, param)
        unsharded._gathered, unsharded._seen = _DATA.__get__(unsharded), version_of(unsharded)
        watched: UnshardedParameter = unsharded
        return watched

    def _before_reshard(self) -> None:
        changed = False
        for param, tensor, versions in self._split:
            if _versions(tensor) != versions:
                raise ConfigurationError(
                    f"{fsdp.name_of(param)} was changed in a step, or in a method of its unit, where it is split "
                    "over the tensor ranks. Change it in a hook such as on_train_batch_end or on_before_zero_grad."
                )
        for param, unsharded in self._watched:
            if version_of(unsharded) == unsharded._seen and unsharded._alias is None and not unsharded._assigned:
                continue
            written = unsharded.was_written
            try:
                if param.param_dtype is None:
                    # Copy even if `data` was only read: writes through `parameter.data.data` increment no version.
                    _copy_own_shard(param, unsharded)
                    changed = True
                elif written:
                    raise ConfigurationError(_explain_lost_precision(param))
            finally:
                unsharded.watch_again()
        if changed:
            fsdp.await_writes(self._group)


def _versions(unsharded: DTensor) -> tuple[int, int]:
    """Return the version of a DTensor, which its operations increment, and that of its local tensor."""
    return version_of(unsharded), version_of(local_of(unsharded))


@torch.no_grad()
def _copy_own_shard(param: Any, unsharded: UnshardedParameter) -> None:
    local = local_of(param.sharded_param)
    if local.numel() > 0:
        local.copy_(fsdp.local_shard_view(param, unsharded.detach()))
    if unsharded._assigned:  # FSDP2 reshards from its own memory, perhaps over fewer ranks
        unsharded._gathered.copy_(unsharded.detach())


def _explain_lost_precision(param: Any) -> str:
    dtype = str(param.param_dtype).removeprefix("torch.")
    return (
        f"{fsdp.name_of(param)} was changed while it was unsharded, in a step or in a method of its unit. An "
        f"unsharded parameter is a copy in {dtype}, which is less precise than "
        f"{str(param.orig_dtype).removeprefix('torch.')}. Change it in a hook such as on_train_batch_end or "
        "on_before_zero_grad, where parameters are sharded and exact, or train with precision='32-true' or 'bf16-true'."
    )
