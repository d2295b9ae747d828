"""All-reduce algorithms as pure functions of `(tensor, group)`, the DDP hook that runs them, and a traffic counter."""

from lightning_paral.comm.direct import all_to_all_all_reduce, reduce_broadcast_all_reduce
from lightning_paral.comm.point_to_point import Traffic, count_traffic
from lightning_paral.comm.reduction import AllReduce, WireDtype, native_all_reduce
from lightning_paral.comm.ring import ring_all_reduce

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring_all_reduce,
    "native": native_all_reduce,
    "reduce_broadcast": reduce_broadcast_all_reduce,
    "all_to_all": all_to_all_all_reduce,
}
"""The all-reduce functions, by the names that options use."""

__all__ = [
    "ALL_REDUCE",
    "AllReduce",
    "Traffic",
    "WireDtype",
    "all_to_all_all_reduce",
    "count_traffic",
    "native_all_reduce",
    "reduce_broadcast_all_reduce",
    "ring_all_reduce",
]
