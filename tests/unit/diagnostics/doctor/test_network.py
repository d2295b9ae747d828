"""The interfaces that gloo and NCCL choose."""

import os
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from lightning_paral.diagnostics.doctor.network import (
    Interface,
    gloo_fact,
    interfaces,
    nccl_interface_fact,
)

KNOWN = [
    Interface(name="lo", addresses=("127.0.0.1",)),
    Interface(name="docker0", addresses=("172.17.0.1",)),
    Interface(name="eth0", addresses=("10.0.0.5",)),
    Interface(name="ib0", addresses=("10.1.0.5",)),
]


@pytest.mark.parametrize("given", [None, *(interface.name for interface in interfaces())])
def test_gloo_listens_on_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    before = psutil.Process().connections("inet")
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    (new,) = (each.laddr.ip for each in psutil.Process().connections("inet") if each not in before)

    fact = gloo_fact(interfaces(), os.environ)

    chosen = next(interface for interface in interfaces() if interface.name == fact.data["interface"])
    assert new in chosen.addresses
    assert fact.state != "broken"
    del group


def test_gloo_on_an_interface_that_does_not_exist_is_broken() -> None:
    fact = gloo_fact(KNOWN, {"GLOO_SOCKET_IFNAME": "eth7"})

    assert fact.state == "broken"
    assert "'eth7'" in fact.found
    assert fact.advice == "Set GLOO_SOCKET_IFNAME to one of lo, docker0, eth0, ib0, or unset it."


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("", "ib0"), ("eth", "eth0"), ("^ib,docker", "eth0"), ("=docker0", "docker0"), ("^=ib0", "eth0")],
)
def test_nccl_follows_its_documented_order(given: str, chosen: str) -> None:
    fact = nccl_interface_fact(KNOWN, {"NCCL_SOCKET_IFNAME": given} if given else {})

    assert (fact.data["interface"], fact.state) == (chosen, "ok")


def test_nccl_without_a_matching_interface_is_broken() -> None:
    assert nccl_interface_fact(KNOWN, {"NCCL_SOCKET_IFNAME": "=eth"}).state == "broken"
