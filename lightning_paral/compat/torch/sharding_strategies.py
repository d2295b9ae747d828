"""The operations that DTensor supports on shards: about 600 in torch 2.11, 1,200 in torch 2.13."""

from typing import Any

from torch.distributed.tensor import DTensor

from lightning_paral.compat.private_name import Names

_TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")

NAMES: Names = {
    "torch.distributed.tensor.DTensor": {"_op_dispatcher": "look up which operations work on shards"},
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": {
        ".op_strategy_funcs": "look up which operations work on shards",
        ".op_single_dim_strategy_funcs": "look up which operations work on shards",
        ".op_to_rules": "look up which operations work on shards",
    },
}


def has_strategy(operation: Any) -> bool:
    """Return whether DTensor supports `operation`, an overload such as `torch.ops.aten.median.default`."""
    dispatcher: Any = DTensor._op_dispatcher
    return any(operation in getattr(dispatcher.sharding_propagator, table) for table in _TABLES)
