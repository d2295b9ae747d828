"""Simulated nodes on one machine: network namespaces, joined by a bridge over links of a given bandwidth."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from tests.launching import Ended, run_together


class Nodes:
    """Simulated nodes that can reach each other, and no other machine."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.addresses = [f"10.77.0.{number}" for number in range(1, len(names) + 1)]

    def command_on(self, node: int, command: list[str]) -> list[str]:
        """Return the command that runs `command` on node number `node`."""
        return ["ip", "netns", "exec", self.names[node], *command]


def why_no_nodes() -> str | None:
    """Return why this process cannot create network namespaces, or `None` if it can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (Debian's iproute2)"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no permission to create network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@contextmanager
def joined_nodes(num_nodes: int, rate: str | None = None, burst: str = "256kb") -> Iterator[Nodes]:
    """Create nodes for the duration of the context.

    Args:
        num_nodes: the number of nodes.
        rate: the bandwidth of the link of each node in each direction, such as `1gbit`; `None` for no limit.
        burst: how much a link that was idle lets through at once, before it limits the bandwidth.
    """
    tag = uuid.uuid4().hex[:6]
    bridge = f"br{tag}"
    nodes = Nodes([f"node{number}-{tag}" for number in range(num_nodes)])
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, (name, address) in enumerate(zip(nodes.names, nodes.addresses, strict=True)):
            link = f"v{number}{tag}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
                _run("tc", "qdisc", "add", "dev", link, *limit)
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield nodes
    finally:
        for name in nodes.names:  # also deletes the node's links
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def run_on_nodes(num_nodes: int, command: list[str], rate: str, burst: str = "256kb", *, timeout: float) -> list[Ended]:
    """Run a command on each of several new nodes as one rank; return how each ended, without standard error."""
    with joined_nodes(num_nodes, rate, burst) as nodes:
        shared = {"WORLD_SIZE": f"{num_nodes}", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": "29544", "GLOO_SOCKET_IFNAME": "eth0"}
        commands = [nodes.command_on(node, command) for node in range(num_nodes)]
        variables = [shared | {"RANK": f"{node}", "NODE_RANK": f"{node}"} for node in range(num_nodes)]
        return run_together(commands, variables, timeout=timeout, told_apart=True)
