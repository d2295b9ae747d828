"""How long collectives take: latency and bandwidth.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005. A
message of n bytes takes alpha + n/B. In a ring of N ranks, an all-reduce of n bytes has 2(N-1) steps of n/N bytes, an
all-gather or a reduce-scatter N-1 of them. NCCL and gloo have the ring. NCCL also has algorithms with a logarithmic
number of steps, and chooses the one that its tuner predicts to be the fastest: two trees for an all-reduce (Sanders,
Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12),
2009), and parallel aggregated trees for the other two (Jeaugey, "PAT", arXiv:2506.20252), with one rank per node.
"""

from math import ceil, log2

from lightning_paral.planning.time.machine import LOCAL_LATENCY, Machine


class Collectives:
    """The seconds of collectives among ranks.

    Args:
        machine: the links.
        num_ranks: the number of ranks N, in as few nodes as possible.
        on_cpu: whether the backend is gloo, which has the ring only.
    """

    def __init__(self, machine: Machine, num_ranks: int, *, on_cpu: bool) -> None:
        self.num_ranks = num_ranks
        self._num_nodes = ceil(num_ranks / machine.ranks_per_node)
        self._has_trees = not on_cpu
        self._copy_bandwidth = machine.copy_bandwidth if on_cpu and num_ranks > 1 else None
        is_local = self._num_nodes == 1 and machine.local_link is not None
        self.bandwidth = machine.local_link if is_local and machine.local_link else machine.link
        """Bytes per second of the slowest link on the way around the ring."""
        self._latency = LOCAL_LATENCY if is_local else machine.latency
        # Most steps of a ring are within a node. They are no slower than those between nodes.
        self._steps_latency = (
            (num_ranks - 1) * self._latency
            if is_local or machine.ranks_per_node == 1
            else (self._num_nodes - 1) * machine.latency
            + (num_ranks - self._num_nodes) * min(LOCAL_LATENCY, machine.latency)
        )
        self._levels = ceil(log2(num_ranks)) if machine.ranks_per_node == 1 else ceil(log2(self._num_nodes)) + 1

    def message(self, num_bytes: float) -> float:
        """Return the seconds of a message from one rank to another."""
        return self._latency + num_bytes / self.bandwidth

    def copy(self, num_bytes: float) -> float:
        """Return the seconds of a copy between tensors and the buffers of collectives."""
        return 0.0 if self._copy_bandwidth is None else num_bytes / self._copy_bandwidth

    def all_reduce(self, num_bytes: float, *, ring: bool = False) -> float:
        """Return the seconds of an all-reduce of a tensor of `num_bytes`.

        Args:
            num_bytes: the size of the tensor.
            ring: whether it is a ring, whatever the backend would choose.
        """
        if self.num_ranks == 1:
            return 0.0
        of_ring = 2 * (self._steps_latency + self._share(num_bytes) / self.bandwidth)
        if ring or not self._has_trees:
            return of_ring
        return min(of_ring, 2 * (self._levels * self._latency + num_bytes / self.bandwidth))

    def all_gather(self, num_bytes: float) -> float:
        """Return the seconds of an all-gather whose result has `num_bytes`. NCCL's reduce-scatter takes as long."""
        if self.num_ranks == 1:
            return 0.0
        if self.num_ranks == 2 and not self._has_trees:
            # Both neighbors of a rank are the other one, over a single connection. gloo sends half of a message only
            # after the receiver has said that it is ready, and this notice waits behind the data that the receiver
            # sends itself (gloo/allgather.cc, gloo/transport/tcp/pair.cc). So one rank sends after the other.
            return 2 * self.message(num_bytes / 2)
        has_trees = self._has_trees and self._num_nodes == self.num_ranks
        latency = min(self._steps_latency, self._levels * self._latency) if has_trees else self._steps_latency
        return latency + self._share(num_bytes) / self.bandwidth

    def reduce_scatter(self, num_bytes: float) -> float:
        """Return the seconds of NCCL's reduce-scatter of a tensor of `num_bytes`."""
        return self.all_gather(num_bytes)

    def direct_reduce_scatter(self, num_bytes: float) -> float:
        """Return the seconds of `comm.reduce_scatter.direct_reduce_scatter`, whose messages are all sent at once."""
        return 0.0 if self.num_ranks == 1 else self._latency + self._share(num_bytes) / self.bandwidth

    def _share(self, num_bytes: float) -> float:
        return num_bytes * (self.num_ranks - 1) / self.num_ranks
