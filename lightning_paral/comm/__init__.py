"""All-reduce algorithms as pure functions of `(tensor, group)`, the DDP hook that runs them, and a traffic counter."""

from lightning_paral.comm.native import native_all_reduce
from lightning_paral.comm.reduction import AllReduce, WireDtype
from lightning_paral.comm.ring import ring_all_reduce
from lightning_paral.comm.textbook import all_to_all_all_reduce, reduce_broadcast_all_reduce
from lightning_paral.comm.traffic import Traffic, count_traffic

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
