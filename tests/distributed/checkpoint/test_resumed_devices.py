"""Resume restores the random states of a rank's own devices."""

import pytest
import torch

from lightning_paral import ParalDPStrategy
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.distributed.rng_state import current_states, restore_states, without_cuda_states


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
