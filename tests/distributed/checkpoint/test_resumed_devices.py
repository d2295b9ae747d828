"""Resume places optimizer state on its parameter's device, and restores random states of a rank's own devices."""

import pytest
import torch
from torch.optim import SGD, AdamW

from lightning_paral import ParalDPStrategy
from lightning_paral.checkpoint.state.optimizer import place_state
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.distributed.rng_state import current_states, restore_states, without_cuda_states


def test_state_is_placed_beside_its_parameter_and_steps_stay() -> None:
    host, device = (torch.zeros(2, device=name, requires_grad=True) for name in ("cpu", "meta"))
    optimizer = AdamW([host, device])
    optimizer.state[host] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "count": 3}
    optimizer.state[device] = {"step": torch.tensor(1.0), "history": [torch.zeros(2)]}
    of_another_kind = SGD([device])
    of_another_kind.state[device] = torch.zeros(2)
    of_another_kind.state["all"] = {"total": torch.zeros(())}

    place_state(optimizer, torch.device("meta"))
    place_state(of_another_kind, torch.device("meta"))

    on_host, on_device = optimizer.state[host], optimizer.state[device]
    assert (str(on_host["step"].device), str(on_device["step"].device)) == ("cpu", "cpu")
    assert str(on_host["exp_avg"].device) == "cpu"
    assert on_host["count"] == 3
    assert str(on_device["history"][0].device) == "meta"
    assert str(of_another_kind.state[device].device) == "meta"
    assert str(of_another_kind.state["all"]["total"].device) == "meta"


class Generators:
    """Simulates the CUDA generators of a node. A state is a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.numbers = list(numbers)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def get(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.numbers[device.index]], dtype=torch.uint8)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.numbers[device.index] = state.item()


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def test_random_state_of_a_device_is_restored_under_another_index(monkeypatch) -> None:
    Generators(monkeypatch, *range(10, 18))
    states = [current_states(cuda(rank)) for rank in range(8)]
    assert [state["cuda"][0].item() for state in states] == list(range(10, 18))

    seen = Generators(monkeypatch, 0)  # one device is visible to each process
    restore_states(states, RankGroup(5, 8), cuda(0))
    assert seen.numbers == [15]
    restore_states([without_cuda_states(states[0])] * 8, RankGroup(5, 8), cuda(0))
    assert seen.numbers == [15]


def test_all_devices_of_one_process_have_their_random_states_saved(monkeypatch) -> None:
    Generators(monkeypatch, 3, 4, 5)
    strategy = ParalDPStrategy(parallel_devices=cuda(2, 0))

    states = current_states(strategy._own_devices)

    assert [state.item() for state in states["cuda"]] == [5, 3]
    seen = Generators(monkeypatch, 0)
    restore_states([states], RankGroup(), cuda(0))
    assert seen.numbers == [5]
