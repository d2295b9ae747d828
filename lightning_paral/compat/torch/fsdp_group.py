"""Callbacks for when FSDP2 unshards and reshards a group of parameters."""

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_paral.compat.private_name import PrivateName

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_SEEN = "torch 2.11 to 2.13"
_NO_HOOK = "no public hook runs when parameters are unsharded or resharded"

_UNSHARD = PrivateName(
    name=f"{_GROUP}._to_unsharded",
    purpose="to call a function after parameters are unsharded",
    reason=_NO_HOOK,
    seen=_SEEN,
    parameters=("self",),
)
_RESHARD = tuple(
    PrivateName(
        name=f"{_GROUP}.{name}",
        purpose="to copy writes to unsharded parameters back to the shards before they are resharded",
        reason=_NO_HOOK,
        seen=_SEEN,
        parameters=("self",),
    )
    for name in ("_to_sharded", "_to_sharded_post_forward")
)
NAMES = (
    _UNSHARD,
    *_RESHARD,
    PrivateName(
        name=f"{_GROUP}._wait_all_gather_streams_on_event",
        purpose="to make the next all-gather wait for writes to shards",
        reason="no public name gives the streams on which all-gathers run",
        seen=_SEEN,
        parameters=("self", "event"),
    ),
    PrivateName(
        name=f"{_GROUP}._sharded_state",
        purpose="to distinguish unsharded parameters from those resharded over fewer ranks",
        reason="no public name gives the state of a group: the class is private",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState.UNSHARDED",
        purpose="to know whether parameters are unsharded",
        reason="no public name gives the state of a group: the class is private",
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"{_GROUP}.{attribute}",
            purpose="to find the parameters of a unit",
            reason="no public name lists the parameters that are gathered together: the class is private",
            seen=_SEEN,
            on_instances=True,
        )
        for attribute in ("fsdp_params", "device_handle", "is_unsharded")
    ),
)


def watch(group: Any, after_unshard: Callable[[], None], before_reshard: Callable[[], None]) -> None:
    """Call functions whenever the parameters of `group` are unsharded or resharded, as long as `group` exists.

    Args:
        group: an `FSDPParamGroup`.
        after_unshard: called after parameters have been unsharded.
        before_reshard: called before unsharded parameters are resharded.

    Raises:
        PrivateNameError: this version of torch unshards or reshards in a different way.
    """
    _UNSHARD.resolve()
    unshard = group._to_unsharded

    def to_unsharded() -> None:
        unshard()
        after_unshard()

    group._to_unsharded = to_unsharded
    for entry in _RESHARD:
        entry.resolve()
        method = entry.name.rpartition(".")[2]
        setattr(group, method, _with_callback(before_reshard, group, getattr(group, method)))


def keep_unsharded(group: Any, is_needed: Callable[[], bool]) -> None:
    """Leave the parameters of `group` unsharded while `is_needed()`, even if `state_dict` reshards them.

    Call it after `watch`. The group still reshards when `is_needed()` is false.

    Raises:
        PrivateNameError: this version of torch reshards in a different way.
    """
    entry = _RESHARD[0]
    entry.resolve()
    method = entry.name.rpartition(".")[2]
    reshard = getattr(group, method)
    setattr(group, method, lambda: None if is_needed() else reshard())


def _with_callback(before_reshard: Callable[[], None], group: Any, reshard: Callable[[], None]) -> Callable[[], None]:
    def to_sharded() -> None:
        if group._sharded_state is ShardedState.UNSHARDED:
            before_reshard()
        reshard()

    return to_sharded


def await_writes(group: Any) -> None:
    """Make the next all-gather of `group` wait for writes to the shards that are queued on the current stream."""
    event = group.device_handle.Event()
    event.record()
    group._wait_all_gather_streams_on_event(event)
