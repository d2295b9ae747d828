"""Tensors of deferred construction have the values of ordinary construction, whatever code does with them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paral.errors import ConfigurationError
from lightning_paral.model import deferred
from lightning_paral.model.deferred import DeferredConstruction


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


class Network(nn.Module):
    def build(self) -> None:
        self.embedding = nn.Embedding(50, 32, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        for block in self.blocks:
            nn.init.orthogonal_(block.up.weight)
            nn.init.trunc_normal_(block.down.weight, std=0.2)
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(2.0)
            self.blocks[2].down.weight[1:3] = 0.5
            self.blocks[2].up.weight.copy_(self.blocks[1].up.weight * 0.5)
        self.teacher = copy.deepcopy(self.blocks)
        self.listed = nn.Parameter(torch.tensor([float(i) for i in range(300)]))
        self.listed.data.add_(1)
        self.copied = nn.Parameter(torch.randn(300))
        self.copied.data.copy_(self.listed)
        self.lazy = nn.LazyLinear(10)
        self.lazy(torch.randn(4, 300))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(20, 30))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.register_buffer("positions", torch.arange(300) * 0.5)
        torch.set_default_dtype(before)
        self.plain = [torch.randperm(300), torch.randn(300, generator=torch.Generator().manual_seed(3))]
        self.rows = torch.stack([parameter.detach().flatten()[:10] for parameter in self.blocks.parameters()])
        self.drawn_last = torch.rand(2)

    def build_outside(self) -> None:
        """Make tensors that the module does not hold, or that are read without an operation."""
        self.pair = torch.randn(300), torch.randn(300).conj()
        self.spectrum = torch.fft.fft(torch.randn(300)).conj()
        self.sparse = torch.eye(30).to_sparse()
        self.shared = nn.Parameter(torch.randn(300))
        self.array = self.shared.detach().numpy()
        self.array[3] = 7
        self.sum = sum(self.shared.tolist())


def built(method: str, is_deferred: bool) -> Network:
    torch.manual_seed(0)
    network = Network()
    if not is_deferred:
        getattr(network, method)()
        return network
    construction = DeferredConstruction(torch.device("cpu"))
    with construction.recording(network):
        getattr(network, method)()
    assert not construction.is_empty
    assert any(parameter.is_meta for parameter in network.parameters())
    construction.fill(list(network.modules()))
    assert construction.is_empty
    return network


@pytest.fixture(params=[0, 1000])
def threshold(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", request.param)


@pytest.mark.usefixtures("threshold")
def test_values_equal_those_of_ordinary_construction() -> None:
    expected, network = built("build", False), built("build", True)
    tensors = expected.state_dict()
    assert network.state_dict().keys() == tensors.keys()
    for name, value in network.state_dict().items():
        assert value.dtype == tensors[name].dtype
        assert torch.equal(value, tensors[name]), name
    assert all(map(torch.equal, network.plain, expected.plain))
    assert torch.equal(network.rows, expected.rows)
    assert torch.equal(network.drawn_last, expected.drawn_last)
    assert network.head.weight is network.embedding.weight


@pytest.mark.usefixtures("threshold")
def test_tensors_that_others_hold_or_read_have_values() -> None:
    expected, network = built("build_outside", False), built("build_outside", True)
    assert all(map(torch.equal, network.pair, expected.pair))
    assert torch.equal(network.spectrum, expected.spectrum)
    assert torch.equal(network.sparse.to_dense(), expected.sparse.to_dense())
    assert torch.equal(network.shared, expected.shared)
    assert network.sum == expected.sum


def test_parameters_on_the_meta_device_are_refused() -> None:
    network = nn.Module()
    with (
        pytest.raises(ConfigurationError, match=r"head\.weight of Module is on the meta device"),
        DeferredConstruction(torch.device("cpu")).recording(network),
        torch.device("meta"),
    ):
        network.head = nn.Linear(3, 2)
