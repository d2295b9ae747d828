"""`ParalMonitor(plan=True)` on two ranks: what was predicted beside what was measured."""

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_paral import ParalDDPStrategy, ParalMonitor, plan
from tests.distributed.planning.measured import LENGTH, Bytes
from tests.models.regression import Regression, regression_data
from tests.rank_pool import RankPool
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


def summary_of_fit(strategy: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        planned_and_measured(strategy, 1)
    return out.getvalue()


def test_summary_has_predicted_and_measured_bytes_and_the_error(fresh_ranks: RankPool) -> None:
    first, other = fresh_ranks.run(2, summary_of_fit, "paral_fsdp")
    lines = [line.split() for line in first.splitlines()]
    (header,) = [line for line in lines if line[:1] == ["plan"]]
    rows = [line for line in lines[lines.index(header) :] if line]

    assert header == ["plan", "paral_fsdp", "predicted", "measured", "error"]
    assert rows[2][:3] == ["host", "memory,", "grown"]
    assert rows[3][:3] == ["sent", "per", "step"]
    assert abs(float(rows[3][-1].rstrip("%"))) < 3
    assert "plan" not in other


class Unplannable(Regression):
    """Its shapes are unknown without values, and its optimizer reads values of the weights."""

    def configure_optimizers(self) -> Any:
        if not float(sum(parameter.abs().sum() for parameter in self.parameters())) > 0:
            raise ValueError("no weights")
        return super().configure_optimizers()


def fit_without_a_plan(strategy: str, on_rank: int | None) -> tuple[int, bool, str]:
    """Fit with `plan=True` on one rank or all; return the steps, whether there is a plan, and the warning."""
    is_planned = on_rank in (None, dist.get_rank())
    monitor = ParalMonitor(plan=is_planned, print_summary=False)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[monitor])
    module: LightningModule = Unplannable() if on_rank is None else Regression()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, regression_data(3, 2))
    messages = [str(each.message) for each in caught if "ParalMonitor" in str(each.message)]
    return trainer.global_step, monitor.planned is not None, "".join(messages)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fit_that_cannot_be_planned_says_why_and_goes_on(on_ranks, strategy: str) -> None:
    (*first, message), other = on_ranks(2, fit_without_a_plan, strategy, None)

    assert first == [3, False]
    assert "has no plan to compare with: Unplannable.configure_optimizers() failed" in message
    assert "\n" not in message
    assert other == (3, False, "")


def test_strategies_of_others_are_not_planned(on_ranks) -> None:
    steps, has_plan, message = on_ranks(2, fit_without_a_plan, "ddp", 0)[0]

    assert (steps, has_plan) == (3, False)
    assert "DDPStrategy is not a strategy that can be planned" in message


@pytest.mark.parametrize("on_rank", [0, 1])
def test_option_of_one_rank_makes_no_rank_wait(on_ranks, on_rank: int) -> None:
    results = on_ranks(2, fit_without_a_plan, "paral_ddp", on_rank)

    assert [steps for steps, *_ in results] == [3, 3]
    assert [has_plan for _, has_plan, _ in results] == [on_rank == 0, False]


def planned_bytes_of(split: Any) -> float:
    monitor = ParalMonitor(plan=True, print_summary=False)
    trainer = quiet_trainer(strategy=ParalDDPStrategy(split=split), devices=2, max_steps=1, callbacks=[monitor])
    trainer.fit(gpt(WIDTH, NUM_LAYERS), DataLoader(Bytes(), batch_size=2 * BATCH_SIZE))
    return monitor.values.get("paral/planned_bytes", 0.0)


def test_batch_that_is_divided_among_ranks_is_planned_as_divided(on_ranks) -> None:
    batch = torch.zeros((), dtype=torch.long).expand(BATCH_SIZE, LENGTH)
    planned = plan(gpt(WIDTH, NUM_LAYERS), (batch, batch), 2, strategies=["paral_ddp"], device_type="cpu")

    assert on_ranks(2, planned_bytes_of, "global")[0] == planned.estimates[0].memory.peak_bytes
