"""The operations that DTensor supports on shards: about 600 in torch 2.11, 1,200 in torch 2.13."""

from typing import Any

from torch.distributed.tensor import DTensor

from lightning_paral.compat.private_name import PrivateName

_REASON = "no public name lists the operations that DTensor supports; the others raise an error when they run"
_SEEN = "torch 2.11 to 2.13"
_TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
_PROPAGATOR = "torch.distributed.tensor._sharding_prop.ShardingPropagator"

NAMES = (
    PrivateName(
        name="torch.distributed.tensor.DTensor._op_dispatcher",
        purpose="to look up which operations work on shards",
        reason=_REASON,
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"{_PROPAGATOR}.{table}",
            purpose="to look up which operations work on shards",
            reason=_REASON,
            seen=_SEEN,
            on_instances=True,
        )
        for table in _TABLES
    ),
)


def has_strategy(operation: Any) -> bool:
    """Return whether DTensor supports `operation`, an overload such as `torch.ops.aten.median.default`."""
    dispatcher: Any = DTensor._op_dispatcher
    return any(operation in getattr(dispatcher.sharding_propagator, table) for table in _TABLES)
