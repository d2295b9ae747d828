"""Inputs of units are offloaded between forward and backward, each once, and freed in time."""

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_paral.errors import ConfigurationError
from lightning_paral.model.offloaded_inputs import OffloadedInputs

WIDTH, DEPTH = 6, 5


class OfThisTest(OffloadedInputs):
    """Treats matrices as large tensors on a GPU, and records copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, float]] = []

    def is_offloaded(self, tensor: Tensor) -> bool:
        return tensor.dim() == 2

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> Any:
        to_host = source.untyped_storage().data_ptr() not in self.on_host
        self.on_host.add((target if to_host else source).untyped_storage().data_ptr())
        self.copies.append(("to host" if to_host else "back", source.flatten()[0].item()))
        return super()._copy(target, source, device)

    on_host: set[int]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.inputs: list[Any] = []

    def unit(self, number: int, x: Tensor, mask: Tensor, scale: Tensor, small: Tensor) -> Tensor:
        return torch.tanh(self.layers[number](x) @ scale) * mask + small

    def forward(self, offloaded: OffloadedInputs | None, x: Tensor) -> Tensor:
        mask, small = torch.full((3, WIDTH), 0.5), torch.ones(WIDTH)
        x = x + 1.0
        for number in range(DEPTH):
            self.inputs.append(ref(x.untyped_storage()))
            arguments = (number, x, mask, self.scale, small)
            if offloaded is None:
                x = self.unit(*arguments)
            else:
                with offloaded.saving_inputs():
                    x = checkpoint(self.unit, *arguments, use_reentrant=False)
            del arguments
        return x


def gradients(net: Net) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return found


def offloaded_here() -> OfThisTest:
    offloaded = OfThisTest()
    offloaded.on_host = set()
    return offloaded


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def test_gradients_equal_those_without_offloading(batch: Tensor) -> None:
    net, offloaded = Net(), offloaded_here()
    net(None, batch).square().sum().backward()
    expected = gradients(net)

    for _ in range(2):
        net(offloaded, batch).square().sum().backward()
        torch.testing.assert_close(gradients(net), expected, rtol=0.0, atol=0.0)
    first, second = net(offloaded, batch), net(offloaded, batch * 0 + batch)  # two graphs at the same time
    first.square().sum().backward(retain_graph=True)
    torch.testing.assert_close(gradients(net), expected, rtol=0.0, atol=0.0)
    second.square().sum().backward()
    torch.testing.assert_close(gradients(net), expected, rtol=0.0, atol=0.0)


def test_each_tensor_is_copied_once_and_back_only_if_it_was_freed(batch: Tensor) -> None:
    net, offloaded = Net(), offloaded_here()

    out = net(offloaded, batch)
    to_host = len(offloaded.copies)
    out.square().sum().backward()
    back = offloaded.copies[to_host:]

    assert to_host == DEPTH + 1  # includes the mask, but no parameter and no small tensor
    assert {way for way, _ in offloaded.copies[:to_host]} == {"to host"}
    assert {way for way, _ in back} == {"back"}
    assert len(back) == DEPTH - 2 + 1
    assert len({value for _, value in back}) == len(back)


def test_no_copy_stays_after_backward_or_without_one(batch: Tensor) -> None:
    net, offloaded = Net(), offloaded_here()
    net(offloaded, batch).square().sum().backward()
    assert all(storage() is None for storage in net.inputs)
    net(offloaded, batch)  # a forward pass with gradients but no backward pass
    assert all(storage() is None for storage in net.inputs)


def test_a_tensor_written_to_between_units_is_copied_again() -> None:
    offloaded, layer = offloaded_here(), nn.Linear(WIDTH, WIDTH)
    table = torch.zeros(2, WIDTH)
    for value in (1.0, 2.0):
        table.fill_(value)
        with offloaded.saving_inputs():
            checkpoint(lambda x: layer(x), table, use_reentrant=False)
    assert offloaded.copies == [("to host", 1.0), ("to host", 2.0)]


@pytest.mark.parametrize("offloads", [True, False])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_change_in_place_is_an_error_as_without_offloading(offloads: bool, depth: int) -> None:
    offloaded = offloaded_here() if offloads else OffloadedInputs()
    layer = nn.Linear(WIDTH, WIDTH)

    def changes_its_input(x: Tensor) -> Tensor:
        x += 1.0
        return layer(x)

    def run() -> None:
        x = torch.zeros(3, WIDTH, requires_grad=True) * 2
        for _ in range(depth):
            with offloaded.saving_inputs():
                x = checkpoint(changes_its_input, x, use_reentrant=False)
        x.sum().backward()

    with pytest.raises(ConfigurationError, match=r"shape \(3, 6\), was changed in place"):
        run()
