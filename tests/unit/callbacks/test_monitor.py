"""`ParalMonitor` in one process: its options, and the ways in which a fit runs and ends."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning_paral.callbacks.monitoring import measured_steps
from lightning_paral.callbacks.monitoring.memory import HostBeforeFit, read_memory

from lightning_paral import ConfigurationError, ParalMonitor
from lightning_paral.planning.isolated import run_isolated
from tests.host_syncs import HostSyncs
from tests.models.regression import GLOBAL_BATCH_SIZE, fit_regression


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps has to be larger than 0"),
        ({"every_n_steps": 2.5}, "Give an integer"),
        ({"tokens_per_sample": -1}, "tokens_per_sample has to be larger than 0"),
        ({"tokens_per_sample": "many"}, "Give an integer, a function or None."),
        ({"peak_flops": 1e12}, "has no flops_per_step"),
        ({"flops_per_step": 1e9}, "has no peak_flops"),
        ({"flops_per_step": 1e9, "peak_flops": float("inf")}, "and finite"),
        ({"planned_bytes": 0}, "planned_bytes has to be larger than 0"),
        ({"planned_bytes": 1, "plan": True}, "plan=True computes the bytes"),
        ({"every_step": 1}, "Did you mean every_n_steps?"),
    ],
)
def test_options_are_checked_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        ParalMonitor(**options)

    assert message in str(raised.value)


def values_of(monitor: ParalMonitor, *names: str) -> list[float]:
    return [monitor.values[f"paral/{name}"] for name in names]


def test_parts_of_a_step_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = ParalMonitor(every_n_steps=3, tokens_per_sample=lambda batch: 2 * len(batch[0]))
    fit_regression(10, 2, 1, callbacks=[monitor])
    parts = values_of(monitor, *(f"{name}_seconds" for name in ("data", "forward", "backward", "optimizer", "other")))
    step, samples, tokens = values_of(monitor, "step_seconds", "samples_per_second", "tokens_per_second")

    assert monitor.reports[0].num_steps == 18  # of 19, the first is left out
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(step)
    assert samples == pytest.approx(GLOBAL_BATCH_SIZE / step)
    assert tokens == pytest.approx(2 * samples)
    assert "ParalMonitor: 18 steps" in capsys.readouterr().out


def test_no_step_reads_a_tensor_or_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr(measured_steps, "read_memory", lambda *args: reads.append(len(steps)) or read_memory(*args))
    steps: list[int] = []
    syncs = HostSyncs()

    class Counting(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append(batch_idx)
            syncs.is_counting = True

    monitor = ParalMonitor(every_n_steps=4, tokens_per_sample=2, print_summary=False)
    with syncs.watched():
        fit_regression(10, 1, 1, callbacks=[monitor, Counting()])

    assert not syncs.found
    assert syncs.num_elsewhere  # losses are read by the module
    assert reads == [3, 7, 10]  # in the 4th and 8th step, and at the end


def grown_by_64_mebibytes() -> tuple[int | None, int | None]:
    module = torch.nn.Linear(1024, 1024)  # 4 MiB
    before = HostBeforeFit(module)
    held = torch.ones(16 * 2**20)
    grown = read_memory(torch.device("cpu"), before).host_grown
    del held
    return grown, read_memory(torch.device("cpu"), HostBeforeFit(module)).host_grown


def test_growth_of_host_memory_has_the_modules_tensors_and_needs_a_new_peak() -> None:
    grown, after_a_higher_peak = run_isolated(grown_by_64_mebibytes)

    assert grown == pytest.approx(68 * 2**20, rel=0.05)
    assert after_a_higher_peak is None
