"""When FSDP2 unshards and reshards a group of parameters."""

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_paral.compat.private_name import PrivateName

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_SEEN = "torch 2.11 to 2.13"
_UNSEEN = "no public hook runs when parameters are unsharded or resharded"

_GATHERING = PrivateName(
    name=f"{_GROUP}._to_unsharded",
    purpose="to notice when parameters are unsharded",
    reason=_UNSEEN,
    seen=_SEEN,
    parameters=("self",),
)
_LETTING_GO = tuple(
    PrivateName(
        name=f"{_GROUP}.{name}",
        purpose="to copy writes to unsharded parameters back to the shards before they are resharded",
        reason=_UNSEEN,
        seen=_SEEN,
        parameters=("self",),
    )
    for name in ("_to_sharded", "_to_sharded_post_forward")
)
NAMES = (
    _GATHERING,
    *_LETTING_GO,
    PrivateName(
        name=f"{_GROUP}._wait_all_gather_streams_on_event",
        purpose="to make the next all-gather wait for writes to shards",
        reason="no public name returns the streams of all-gathers",
        seen=_SEEN,
        parameters=("self", "event"),
    ),
    PrivateName(
        name=f"{_GROUP}._sharded_state",
        purpose="to distinguish unsharded parameters from those resharded over fewer ranks",
        reason="is_sharded and is_unsharded are attributes of a private class, too",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState.UNSHARDED",
        purpose="to know whether parameters are unsharded",
        reason="is_unsharded is an attribute of a private class",
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"{_GROUP}.{attribute}",
            purpose="to find the parameters of a unit",
            reason="the class is private: no public name lists the parameters that are gathered together",
            seen=_SEEN,
            on_instances=True,
        )
        for attribute in ("fsdp_params", "device_handle", "is_unsharded")
    ),
)


def watch(group: Any, gathered: Callable[[], None], letting_go: Callable[[], None]) -> None:
    """Call functions whenever the parameters of `group` are unsharded or resharded, as long as `group` lives.

    Args:
        group: an `FSDPParamGroup`.
        gathered: called after parameters have been unsharded.
        letting_go: called before unsharded parameters are resharded.

    Raises:
        PrivateNameError: this version of torch unshards or reshards in another way.
    """
    _GATHERING.resolve()
    unshard = group._to_unsharded

    def to_unsharded() -> None:
        unshard()
        gathered()

    group._to_unsharded = to_unsharded
    for name in _LETTING_GO:
        name.resolve()
        method = name.name.rpartition(".")[2]
        setattr(group, method, _after(letting_go, group, getattr(group, method)))


def _after(letting_go: Callable[[], None], group: Any, shard: Callable[[], None]) -> Callable[[], None]:
    def to_sharded() -> None:
        if group._sharded_state is ShardedState.UNSHARDED:
            letting_go()
        shard()

    return to_sharded


def await_writes(group: Any) -> None:
    """Make the next all-gather of `group` wait for writes to the shards on the current stream."""
    event = group.device_handle.Event()
    event.record()
    group._wait_all_gather_streams_on_event(event)
