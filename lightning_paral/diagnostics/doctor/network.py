"""gloo, NCCL and the network interfaces that they choose, and ports on the loopback interface."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.distributed.launching.launch_checks import check_port_is_free
from lightning_paral.errors import ConfigurationError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    """Its IPv4 and IPv6 addresses, without link-local ones."""

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches this machine only."""
        return any(address == "::1" or address.startswith("127.") for address in self.addresses)


def interfaces() -> list[Interface]:
    """Return the network interfaces that are up and have an address."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        internet = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(address for address in internet if "%" not in address)
        if usable and name in states and states[name].isup:
            found.append(Interface(name=name, addresses=usable))
    return found


def network_facts(environment: Mapping[str, str] = os.environ) -> list[Fact]:
    """Return what processes would use to communicate.

    Args:
        environment: the environment variables.
    """
    known = interfaces()
    facts = [_interfaces(known), gloo_fact(known, environment)]
    if torch.cuda.is_available():
        facts.append(nccl_interface_fact(known, environment))
    return [*facts, _free_port(environment)]


def _interfaces(known: list[Interface]) -> Fact:
    data = {interface.name: list(interface.addresses) for interface in known}
    if not any(interface.is_loopback for interface in known):
        advice = "ip link set lo up"
        return Fact(name="interfaces", found="the loopback is down", state="broken", advice=advice, data=data)
    found = ", ".join(f"{interface.name} {interface.addresses[0]}" for interface in known)
    return Fact(name="interfaces", found=found, data=data)


def gloo_fact(known: list[Interface], environment: Mapping[str, str]) -> Fact:
    """Return which interface gloo chooses: GLOO_SOCKET_IFNAME, else that of the host's name, else the loopback.

    Args:
        known: the interfaces that are up.
        environment: the environment variables.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        advice = "Install torch's own wheel, which has gloo."
        return Fact(name="gloo", found="not in this build of torch", state="broken", advice=advice)
    others = [interface.name for interface in known if not interface.is_loopback]
    given = environment.get("GLOO_SOCKET_IFNAME")
    if given:
        return _given("gloo", "GLOO_SOCKET_IFNAME", given.split(","), known)
    host = socket.gethostname()
    address = _usable_address(host)
    name = next((interface.name for interface in known if address in interface.addresses), None)
    loopback = next((interface.name for interface in known if interface.is_loopback), "lo")
    why = f"the host name {host!r} is {address}" if address else f"the host name {host!r} has no address"
    is_local = address is None or address.startswith("127.") or address == "::1"
    chosen = loopback if is_local else name or address
    data = {"interface": chosen, "address": address}
    if not is_local or not others:
        return Fact(name="gloo", found=f"uses {chosen}: {why}", data=data)
    return Fact(
        name="gloo",
        found=f"uses {chosen}: {why}. Several nodes need another interface.",
        state="note",
        advice=f"export GLOO_SOCKET_IFNAME={others[0]}",
        data=data,
    )


def nccl_interface_fact(known: list[Interface], environment: Mapping[str, str]) -> Fact:
    """Return which interface NCCL chooses: NCCL_SOCKET_IFNAME, else InfiniBand, other ones, Docker, the loopback.

    See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname.

    Args:
        known: the interfaces that are up.
        environment: the environment variables.
    """
    given = environment.get("NCCL_SOCKET_IFNAME", "")
    excluded, exact = given.startswith("^"), given.startswith("=")
    prefixes = [part for part in given.lstrip("^=").split(",") if part]

    def matches(name: str) -> bool:
        return any(name == prefix if exact else name.startswith(prefix) for prefix in prefixes)

    allowed = [each for each in known if not prefixes or matches(each.name) != excluded]
    if not allowed:
        up = ", ".join(interface.name for interface in known)
        found = f"NCCL_SOCKET_IFNAME={given} matches no interface that is up"
        advice = f"Set NCCL_SOCKET_IFNAME to one of {up}, or unset it."
        return Fact(name="NCCL network", found=found, state="broken", advice=advice)

    def order(interface: Interface) -> int:
        if interface.is_loopback:
            return 3
        return 0 if interface.name.startswith("ib") else 2 if interface.name.startswith("docker") else 1

    first = min(allowed, key=order)
    why = f"NCCL_SOCKET_IFNAME={given}" if prefixes else "NCCL's own order"
    return Fact(name="NCCL network", found=f"uses {first.name}: {why}", data={"interface": first.name})


def _given(name: str, variable: str, names: list[str], known: list[Interface]) -> Fact:
    up = [interface.name for interface in known]
    missing = [each for each in names if each not in up]
    given = ",".join(names)
    if missing:
        found = f"{variable}={given}: there is no interface {missing[0]!r} that is up"
        advice = f"Set {variable} to one of {', '.join(up)}, or unset it."
        return Fact(name=name, found=found, state="broken", advice=advice)
    return Fact(name=name, found=f"uses {given}: {variable} is set", data={"interface": given})


def _usable_address(host: str) -> str | None:
    """Return the first address of `host` that belongs to this machine, as gloo does; `None` if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def _free_port(environment: Mapping[str, str]) -> Fact:
    try:
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            probe.listen(1)
            port = probe.getsockname()[1]
    except OSError as error:
        found = f"none on {_LOOPBACK}: {error.strerror}"
        return Fact(name="free port", found=found, state="broken", advice="Free some ports: `ss -s` counts them.")
    if "MASTER_PORT" in environment:
        try:
            check_port_is_free(LightningEnvironment())
        except (ConfigurationError, ValueError, OverflowError) as error:
            return Fact(name="free port", found=f"{port} on {_LOOPBACK}", state="warning", advice=str(error))
    return Fact(name="free port", found=f"{port} on {_LOOPBACK}", data={"port": port})
