"""Callbacks for when FSDP2 unshards and reshards a group of parameters."""

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "_to_unsharded": "call a function after parameters are unsharded",
        "_to_sharded": "copy writes back to the shards before they are resharded",
        "_to_sharded_post_forward": "copy writes back to the shards before they are resharded",
        "_wait_all_gather_streams_on_event(event)": "make the next all-gather wait for writes to shards",
        "._sharded_state": "distinguish unsharded parameters from those resharded over fewer ranks",
        ".fsdp_params": "find the parameters of a unit",
        ".device_handle": "find the parameters of a unit",
        ".is_unsharded": "find the parameters of a unit",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState": {
        "UNSHARDED": "know whether parameters are unsharded",
    },
}


def watch(group: Any, after_unshard: Callable[[], None], before_reshard: Callable[[], None]) -> None:
    """Call functions whenever the parameters of `group` are unsharded or resharded, as long as `group` exists.

    Args:
        group: an `FSDPParamGroup`.
        after_unshard: called after parameters have been unsharded.
        before_reshard: called before unsharded parameters are resharded.

    Raises:
        PrivateNameError: this version of torch unshards or reshards in a different way.
    """
    named(NAMES, "_to_unsharded").resolve()
    unshard = group._to_unsharded

    def to_unsharded() -> None:
        unshard()
        after_unshard()

    group._to_unsharded = to_unsharded
    for method in ("_to_sharded", "_to_sharded_post_forward"):
        named(NAMES, method).resolve()
        setattr(group, method, _with_callback(before_reshard, group, getattr(group, method)))


def keep_unsharded(group: Any, is_needed: Callable[[], bool]) -> None:
    """Leave the parameters of `group` unsharded while `is_needed()`, even if `state_dict` reshards them.

    Call it after `watch`. The group still reshards when `is_needed()` is false.

    Raises:
        PrivateNameError: this version of torch reshards in a different way.
    """
    named(NAMES, "_to_sharded").resolve()
    reshard = group._to_sharded
    group._to_sharded = lambda: None if is_needed() else reshard()


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
