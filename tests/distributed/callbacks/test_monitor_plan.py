"""`ParalMonitor(plan=True)` on two ranks: what was predicted beside what was measured."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_paral import ParalMonitor, plan
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.distributed.planning.measured import LENGTH, Bytes
from tests.running import quiet_trainer
from tests.unit.planning.models import gpt

STRATEGIES = ("paral_ddp", "paral_fsdp", "paral_zero2")
WIDTH, NUM_LAYERS, BATCH_SIZE = 256, 4, 4


def planned_and_measured(strategy: str, accumulate: int) -> tuple[dict[str, float], str, int | None]:
    """Return the values of a fit, the name of the plan, and by how much the host memory of rank 0 has grown."""
    monitor = ParalMonitor(plan=True)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_steps=4,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[monitor],
    )
    trainer.fit(gpt(WIDTH, NUM_LAYERS), DataLoader(Bytes(), batch_size=BATCH_SIZE))
    if monitor.planned is None:
        return monitor.values, "", None
    return monitor.values, monitor.planned.strategy, monitor.reports[0].host_grown


@pytest.mark.parametrize(("strategy", "accumulate"), zip(STRATEGIES, (1, 2, 1), strict=True))
def test_plan_is_that_of_the_strategy_in_use_and_close_to_what_is_measured(
    fresh_ranks: RankPool, strategy: str, accumulate: int
) -> None:
    batch = torch.zeros((), dtype=torch.long).expand(BATCH_SIZE, LENGTH)
    module = gpt(WIDTH, NUM_LAYERS)
    expected = plan(
        module, (batch, batch), 2, accumulate=accumulate, strategies=[strategy], device_type="cpu"
    ).estimates[0]

    (values, name, grown), (of_other_rank, *_) = fresh_ranks.run(2, planned_and_measured, strategy, accumulate)

    assert name == strategy
    assert not of_other_rank
    assert values["paral/planned_bytes"] == expected.memory.peak_bytes
    assert values["paral/planned_sent_bytes"] == expected.wire_bytes / accumulate
    assert values["paral/sent_bytes"] == pytest.approx(values["paral/planned_sent_bytes"], rel=0.03)
    # Resident memory also has what libraries allocate, which is tens of megabytes.
    assert grown is not None
    assert expected.memory.peak_bytes < grown < expected.memory.peak_bytes + 400 * 2**20
