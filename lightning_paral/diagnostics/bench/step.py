"""`paral bench step`: time training steps under several strategies, in rounds in which they take turns.

Each strategy has processes of its own for the whole run, so that each has its own peak of memory. Those that wait for
their turn do nothing.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_paral.comm.traffic import count_traffic
from lightning_paral.diagnostics.bench.devices import device_and_backend
from lightning_paral.diagnostics.bench.names import check_names
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.ranks import OnProgress, Ranks
from lightning_paral.diagnostics.bench.raw_loop import RAW, run_raw_loop
from lightning_paral.diagnostics.bench.step_results import StepResults, summarize_steps
from lightning_paral.diagnostics.bench.task import Task, count_params, make_task
from lightning_paral.distributed.resident_memory import peak_resident_bytes
from lightning_paral.errors import ConfigurationError

DEFAULT_STRATEGIES = ("paral_ddp", "ddp", "raw_ddp", "paral_fsdp", "raw_fsdp")

_MOST_STEPS = 1_000_000
"""More than a benchmark takes. Schedules of learning rates need to know a number."""


def check_strategies(names: Sequence[str]) -> None:
    """Check the names of strategies.

    Raises:
        ConfigurationError: one is unknown, occurs twice, or runs all devices in one process.
    """
    check_names("--strategies", names, (*RAW, *StrategyRegistry.available_strategies()))
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"--strategies names {name!r} twice.")
        if name == "paral_dp":
            raise ConfigurationError(
                "--strategies: paral_dp runs all devices in one process, but this benchmark compares steps of several "
                "processes. Leave it out."
            )


def measure_steps(
    strategies: Sequence[str],
    *,
    config: str | None,
    num_ranks: int,
    rounds: int,
    steps: int,
    timeout: timedelta,
    on_progress: OnProgress | None = None,
) -> StepResults:
    """Measure training steps.

    Args:
        strategies: names of strategies, registered ones and those in `RAW`.
        config: the path of a LightningCLI configuration; `None` for the small Transformer.
        num_ranks: the number of ranks of each strategy.
        rounds: how many turns each strategy has.
        steps: how many steps are measured in a turn, after one that is not.
        timeout: how long to wait for a turn.
        on_progress: called with what is being measured.

    Raises:
        ConfigurationError: a strategy cannot train the module.
        RankFailedError: a rank failed.
    """
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in strategies}
    with ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                Ranks(
                    f"{__name__}:{run_steps.__name__}",
                    {"strategy": name, "config": config, "steps": steps},
                    num_ranks=num_ranks,
                    timeout=timeout,
                    name=name,
                )
            )
            for name in strategies
        }
        for number in range(rounds + 1):
            for name, ranks in groups.items():
                if on_progress is not None:
                    on_progress(f"round {number} of {rounds}: {name}" if number else f"starting {name}")
                turns[name].append(ranks.take_turn(number))
        for ranks in groups.values():
            ranks.end_turns(rounds + 1)
    return summarize_steps(turns, num_ranks)


def run_steps(rank: Rank, *, strategy: str, config: str | None, steps: int) -> None:
    """Train under one strategy, in turns. *Collective* over all ranks.

    The first turn creates everything and trains one step. Each further turn trains one step, and then `steps` steps,
    which are measured. The last turn measures nothing.
    """
    rank.wait_for_turn(0)
    device, _ = device_and_backend()
    began = time.perf_counter()
    task = make_task(config)
    turns = _Turns(rank, task.module, device, steps, began)
    if strategy in RAW:
        run_raw_loop(rank, strategy, task, device, turns.after_step)
    else:
        _train(strategy, task, device, rank.world_size, turns)


def _train(strategy: str, task: Task, device: torch.device, num_ranks: int, turns: "_Turns") -> None:
    trainer = task.make_trainer(strategy, device, num_ranks, _AfterStep(turns), max_steps=_MOST_STEPS)
    trainer.fit(task.module, datamodule=task.data)


class _Turns:
    """Counts and times the steps of this rank, and waits for its turns."""

    def __init__(self, rank: Rank, module: LightningModule, device: torch.device, steps: int, began: float) -> None:
        self._rank = rank
        self._module = module
        self._num_params = count_params(module)
        self._device = device
        self._steps = steps
        self._turn = 0
        self._ends = [began]
        self._traffic = ExitStack()
        self._counted = self._traffic.enter_context(count_traffic())

    def after_step(self, batch: Any) -> bool:
        """Note the end of a step, and at the end of a turn wait for the next. Return whether to go on."""
        is_last = len(self._ends) == (self._steps + 1 if self._turn else 1)
        if is_last and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter())
        if not is_last:
            if self._turn and len(self._ends) == 2:  # the step that is not measured has ended
                self._traffic.close()
                self._counted = self._traffic.enter_context(count_traffic())
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._ends[-1] = time.perf_counter()
            return True
        self._traffic.close()
        self._rank.end_turn(self._turn, self._result(batch))
        self._turn += 1
        if self._rank.wait_for_turn(self._turn):
            return False
        self._counted = self._traffic.enter_context(count_traffic())
        self._ends = [time.perf_counter()]
        return True

    def _result(self, batch: Any) -> dict[str, Any]:
        ends = self._ends if self._turn == 0 else self._ends[1:]
        seconds = [end - start for start, end in pairwise(ends)]
        if self._device.type == "cuda" and self._turn:  # steps end on the host before they end on the device
            seconds = [(ends[-1] - ends[0]) / len(seconds)]
        sent = self._counted.socket_bytes
        is_cuda = self._device.type == "cuda"
        return {
            "module": type(self._module).__name__,
            # configure_model may create them
            "num_params": max(self._num_params, count_params(self._module)),
            "batch_size": extract_batch_size(batch),
            "seconds": seconds,
            "sent_bytes": (self._counted.payload_bytes if sent is None else sent) / max(1, self._steps),
            "peak_host_bytes": peak_resident_bytes(),
            "peak_device_bytes": torch.cuda.max_memory_allocated(self._device) if is_cuda else None,
        }


class _AfterStep(Callback):
    """Calls `_Turns` at the end of each batch."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._turns.after_step(batch):
            trainer.should_stop = True
