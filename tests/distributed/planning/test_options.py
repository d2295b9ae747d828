"""What the options of a strategy change in memory and traffic is predicted."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalMonitor, ParalZeROStrategy, plan
from lightning_paral.planning.estimate import Estimate
from lightning_paral.planning.memory.ledger import Item
from tests.distributed.planning.measured import LENGTH, NUM_LAYERS, WIDTH, Bytes, fit, peak_of
from tests.rank_pool import RankPool
from tests.running import quiet_trainer
from tests.unit.planning.models import gpt

BATCH_SIZE = 8


def planned(strategy: Any, num_ranks: int, batch_size: int = BATCH_SIZE) -> Estimate:
    batch = torch.zeros((), dtype=torch.long).expand(batch_size, LENGTH)
    made = plan(gpt(WIDTH, NUM_LAYERS), (batch, batch), num_ranks, strategies=[strategy], device_type="cpu")
    return made.estimates[0]


def peak_in_fit(cls: type, options: dict[str, Any]) -> int:
    _, mark, profiled = fit(cls(**options), BATCH_SIZE)
    return peak_of(mark, profiled)


MEMORY: list[tuple[int, type, dict[str, Any]]] = [
    (2, ParalDDPStrategy, {"gradient_as_bucket_view": True}),
    (2, ParalFSDPStrategy, {"reshard_after_forward": False}),
    (2, ParalZeROStrategy, {"stage": 2, "reduce_bucket_numel": 200_000}),
    (4, ParalFSDPStrategy, {"replicate": 2}),
]


def test_memory_with_options_is_predicted_within_a_tenth(fresh_ranks: RankPool) -> None:
    for num_ranks, cls, options in MEMORY:
        expected = max(fresh_ranks.run(num_ranks, peak_in_fit, cls, options))
        found = planned(cls(**options), num_ranks).memory.peak_bytes

        assert found == pytest.approx(expected, rel=0.10), (cls.__name__, options)


def peak_of_dp(num_devices: int) -> int:
    _, mark, profiled = fit("paral_dp", BATCH_SIZE, devices=num_devices)
    return peak_of(mark, profiled)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_dp_divides_the_batch_of_the_loader(fresh_ranks: RankPool, num_devices: int) -> None:
    (expected,) = fresh_ranks.run(1, peak_of_dp, num_devices)

    memory = planned("paral_dp", num_devices).memory
    # The profiler does not see activations of the other replicas, which threads of their own allocate.
    unseen = memory.by_item[Item.ACTIVATIONS] * (num_devices - 1) / num_devices
    assert memory.peak_bytes - unseen == pytest.approx(expected, rel=0.05)
    assert memory.by_item[Item.ACTIVATIONS] < planned("paral_ddp", num_devices).memory.by_item[Item.ACTIVATIONS] * 1.05


TRAFFIC: list[tuple[int, type, dict[str, Any]]] = [
    (2, ParalDDPStrategy, {"wire_dtype": "bf16"}),
    (3, ParalDDPStrategy, {"all_reduce": "all_to_all"}),
    (3, ParalDDPStrategy, {"all_reduce": "reduce_broadcast"}),
    (2, ParalFSDPStrategy, {"reshard_after_forward": False}),
    (4, ParalFSDPStrategy, {"replicate": 2}),
]


def sent_in_a_step(cls: type, options: dict[str, Any], num_ranks: int) -> float | None:
    monitor = ParalMonitor(print_summary=False)
    trainer = quiet_trainer(max_steps=4, max_epochs=1, devices=num_ranks, strategy=cls(**options), callbacks=[monitor])
    trainer.fit(gpt(WIDTH, NUM_LAYERS), DataLoader(Bytes(), batch_size=1))
    return max((report.sent_bytes or 0.0 for report in monitor.reports.values()), default=None)


@pytest.mark.parametrize(("num_ranks", "cls", "options"), TRAFFIC)
def test_traffic_with_options_is_that_of_the_sockets(
    on_ranks: Any, num_ranks: int, cls: type, options: dict[str, Any]
) -> None:
    sent = on_ranks(num_ranks, sent_in_a_step, cls, options, num_ranks)[0]

    assert planned(cls(**options), num_ranks).wire_bytes == pytest.approx(sent, rel=0.05)
