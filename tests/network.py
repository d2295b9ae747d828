"""Several hosts on one machine: network namespaces joined by a bridge, over links of a known speed."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager


class Hosts:
    """Hosts that reach each other over one network and nothing else."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.addresses = [f"10.77.0.{number}" for number in range(1, len(names) + 1)]

    def command_on(self, host: int, command: list[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]


def why_no_hosts() -> str | None:
    """Say why this machine cannot make network namespaces, or `None` if it can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (Debian's iproute2)"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no right to make network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@contextmanager
def joined_hosts(num_hosts: int, rate: str | None = None) -> Iterator[Hosts]:
    """Make hosts, each on a link limited to `rate` (such as `1gbit`) each way; remove them at the end."""
    tag = uuid.uuid4().hex[:6]
    bridge = f"br{tag}"
    hosts = Hosts([f"host{number}-{tag}" for number in range(num_hosts)])
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
            link = f"v{number}{tag}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
                _run("tc", "qdisc", "add", "dev", link, *limit)
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield hosts
    finally:
        for name in hosts.names:  # takes the host's links along
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
