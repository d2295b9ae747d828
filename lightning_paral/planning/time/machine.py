"""The machine for which times are predicted: how fast ranks compute, and the links between them."""

from dataclasses import dataclass, replace

from lightning_paral.errors import ConfigurationError

DEFAULT_LATENCY = 14e-6
"""Seconds of a step of a collective over a network: NCCL's own constant for its tuner (`hwLat` in src/graph/tuning.cc,
network, ring, protocol Simple)."""
LOCAL_LATENCY = 3.4e-6
"""As above, for a step within a node over NVLink."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How fast ranks compute and communicate.

    Raises:
        ConfigurationError: a value is not positive, or only one of `local_link` and `ranks_per_node` is given.
    """

    flops: float
    """Floating-point operations per second that a rank achieves in a step, which is less than the peak of the
    datasheet: 40 % of it is a usual value."""
    link: float
    """Bytes per second that a rank can send to other nodes, and at the same time receive from them."""
    latency: float = DEFAULT_LATENCY
    """Seconds of a step of a collective in addition to the time in which its bytes pass through the link."""
    local_link: float | None = None
    """Bytes per second that a rank can send within its node; `None` if it is like `link`."""
    ranks_per_node: int = 1
    optimizer_bandwidth: float | None = None
    """Bytes of parameters, gradients and optimizer states that the optimizer updates per second. `None`: it takes no
    time beyond that in `flops`."""

    copy_bandwidth: float | None = None
    """Bytes per second that a rank on CPU copies between tensors and the buffers of collectives. `None`: copies take no
    time. On CUDA, they are at the bandwidth of device memory and take none."""

    def __post_init__(self) -> None:
        for name in ("flops", "link", "local_link", "ranks_per_node", "optimizer_bandwidth", "copy_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"Machine({name}={value!r}) has to be positive.")
        if not self.latency >= 0:
            raise ConfigurationError(f"Machine(latency={self.latency!r}) has to be a number of seconds, at least 0.")
        if (self.local_link is None) != (self.ranks_per_node == 1):
            raise ConfigurationError(
                f"Machine(local_link={self.local_link!r}, ranks_per_node={self.ranks_per_node}): the link within a "
                "node and the number of its ranks (at least 2) belong together. Give both or neither."
            )

    def every(self, distance: int) -> "Machine":
        """Return the machine as ranks see it that are `distance` apart, such as those that hold the same shards."""
        ranks_per_node = max(1, self.ranks_per_node // distance)
        return replace(self, ranks_per_node=ranks_per_node, local_link=self.local_link if ranks_per_node > 1 else None)
