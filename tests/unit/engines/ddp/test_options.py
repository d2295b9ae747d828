import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator

from lightning_paral import ConfigurationError, ParalDDPStrategy
from tests.running import quiet_trainer


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("mpi", "does not have.*It has: .*gloo"),
        ("carrier_pigeon", "does not have"),
        ("cuda:gloo", "does not support tensors on 'cpu'.*'gloo'"),
    ],
)
def test_invalid_backend_is_refused_by_the_trainer(backend: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(strategy=ParalDDPStrategy(process_group_backend=backend), devices=1)


def test_mps_is_refused() -> None:
    strategy = ParalDDPStrategy(accelerator=MPSAccelerator(), parallel_devices=[torch.device("mps", 0)])

    with pytest.raises(ConfigurationError, match=r"trains on CPU and CUDA.*'mps:0'.*accelerator='cpu'"):
        strategy.set_world_ranks()


def test_more_devices_than_available_are_refused() -> None:
    missing = torch.cuda.device_count()
    strategy = ParalDDPStrategy(parallel_devices=[torch.device("cuda", missing)])

    with pytest.raises(ConfigurationError, match=rf"cuda:{missing}, but only {missing} CUDA"):
        strategy.set_world_ranks()


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")

    with pytest.raises(ConfigurationError, match=r"local rank 2.*gives this node 2 device"):
        quiet_trainer(strategy="paral_ddp", devices=2)
