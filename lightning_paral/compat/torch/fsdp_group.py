"""When FSDP2 gathers a group of parameters, and when it lets go of them."""

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_paral.compat.private_name import PrivateName

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_SEEN = "torch 2.11 to 2.13"
_UNSEEN = "nothing public is called when parameters are gathered or let go"

_GATHERING = PrivateName(
    name=f"{_GROUP}._to_unsharded",
    purpose="to watch parameters from when they are gathered",
    reason=_UNSEEN,
    seen=_SEEN,
    parameters=("self",),
)
_LETTING_GO = tuple(
    PrivateName(
        name=f"{_GROUP}.{name}",
        purpose="to bring writes to gathered parameters back before they are let go",
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
        purpose="to have the next all-gather wait for writes to shards",
        reason="the streams of all-gathers have no public name",
        seen=_SEEN,
        parameters=("self", "event"),
    ),
    PrivateName(
        name=f"{_GROUP}._sharded_state",
        purpose="to tell parameters that are gathered from those that are kept over fewer ranks",
        reason="is_sharded and is_unsharded are attributes of a private class as well",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState.UNSHARDED",
        purpose="to tell parameters that are gathered",
        reason="is_unsharded is an attribute of a private class as well",
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"{_GROUP}.{attribute}",
            purpose="to find the gathered parameters of a unit",
            reason="the class is private: nothing public names the parameters that are gathered together",
            seen=_SEEN,
            on_instances=True,
        )
        for attribute in ("fsdp_params", "device_handle", "is_unsharded")
    ),
)


def watch(group: Any, gathered: Callable[[], None], letting_go: Callable[[], None]) -> None:
    """Have functions called whenever the parameters of `group` change hands, as long as `group` lives.

    Args:
        group: an `FSDPParamGroup`.
        gathered: called after parameters have been gathered.
        letting_go: called before gathered parameters are let go.

    Raises:
        PrivateNameError: this version of torch gathers, or lets go, another way.
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
    """Have the next all-gather of `group` wait for what the current stream has written to the shards."""
    event = group.device_handle.Event()
    event.record()
    group._wait_all_gather_streams_on_event(event)
