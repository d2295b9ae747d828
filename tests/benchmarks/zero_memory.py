"""Measure the bytes of parameters, gradients and optimizer state on each rank, next to the ZeRO paper's formula.

    python -m tests.benchmarks.zero_memory

Counted from the live tensors, in `precision="bf16-true"`, for which the paper gives its formulas (arXiv:1910.02054,
figure 1, K = 12): between two backward passes of an accumulation window, when a rank holds all it has to hold.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.engines.zero.user_access import plain_data
from tests.benchmarks.common import bytes_of, print_table, silent_ranks
from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import quiet_trainer

WIDTH = 64
NUM_LAYERS = 96
NUM_ELEMENTS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) + FEATURES * WIDTH + WIDTH + 2 * WIDTH + 2


class Deep(Regression):
    """A model of 96 equal layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))]
        self.hidden = nn.Sequential(*layers)
        self.out = nn.Linear(WIDTH, 2)
        self.held: dict[str, int] = {}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1:  # the first step creates optimizer state
            self.held.setdefault("optimizer", bytes_of(_optimizer_state(self.trainer.strategy)))

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and "gradients" not in self.held:
            self.held["gradients"] = bytes_of(_gradients(self.trainer.strategy, self))
            self.held["parameters"] = bytes_of(_parameters(self))


def bytes_held(stage: int) -> dict[str, int]:
    """Return the bytes on this rank by kind. *Collective* over the default group."""
    num_ranks = dist.get_world_size()
    model = Deep()
    strategy = ParalZeROStrategy(
        stage=stage,
        deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {},
    )
    trainer = quiet_trainer(
        max_epochs=1, devices=num_ranks, strategy=strategy, precision="bf16-true", accumulate_grad_batches=2
    )
    trainer.fit(model, regression_data(4, num_ranks))
    return model.held


def bytes_by_formula(stage: int, num_ranks: int) -> dict[str, float]:
    """Return the bytes on a rank according to the paper."""
    divided = {"optimizer": stage >= 1, "gradients": stage >= 2, "parameters": stage >= 3}
    per_element = {"optimizer": 12, "gradients": 2, "parameters": 2}
    return {kind: NUM_ELEMENTS * per_element[kind] / (num_ranks if divided[kind] else 1) for kind in per_element}


def _parameters(module: nn.Module) -> Iterator[Tensor | None]:
    for parameter in module.parameters():
        yield plain_data(parameter)
        yield getattr(parameter, "ds_tensor", None)


def _gradients(strategy: Any, module: nn.Module) -> Iterator[Tensor | None]:
    optimizer = strategy.model.optimizer
    for parameter in module.parameters():
        with torch.DisableTorchFunctionSubclass():
            gradient: Tensor | None = Tensor.grad.__get__(parameter)  # the attribute itself, which hooks cannot read
        yield gradient
        yield getattr(parameter, "grad_accum", None)
    if strategy.stage == 3:
        yield optimizer.grad_partitions_flat_buffer
    else:
        for held in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            for group in held.values():
                yield from group or ()


def _optimizer_state(strategy: Any) -> Iterator[Tensor]:
    optimizer = strategy.model.optimizer
    yield from (
        optimizer.fp32_partitioned_groups_flat if strategy.stage == 3 else optimizer.single_partition_of_fp32_groups
    )
    with strategy._engine._users.flat():  # which hooks cannot read
        states = list(optimizer.state.values())
    for state in states:
        yield from (value for value in state.values() if torch.is_tensor(value) and value.numel() > 1)


def print_bytes(
    precision: str,
    headers: tuple[str, str],
    cases: Sequence[tuple[int, int]],
    held_by: Callable[[int], dict[str, int]],
    formula: Callable[[int, int], dict[str, float]],
) -> None:
    """Print the bytes of each case beside the formula.

    Args:
        precision: the precision, for the heading.
        headers: what the two numbers of a case are.
        cases: the number of ranks, and an option of the strategy.
        held_by: called with the option; returns the bytes on this rank by kind. *Collective*.
        formula: called with the option and the number of ranks; returns the bytes on a rank by kind.
    """
    rows = []
    with silent_ranks() as on_ranks:
        for num_ranks, option in cases:
            ranks, expected = on_ranks(num_ranks, held_by, option), formula(option, num_ranks)
            row: list[Any] = [num_ranks, option]
            for kind in ("parameters", "gradients", "optimizer"):
                row += [max(held[kind] for held in ranks) / 1e6, expected[kind] / 1e6]
            rows.append(row)
    print(f"{NUM_ELEMENTS:,} parameters, {precision}; MB on the rank that holds most, and by the formula")
    kinds = ("parameters", "formula", "gradients", "formula", "optimizer", "formula")
    print_table((*headers, *kinds), rows, ".3f")


if __name__ == "__main__":
    every_stage = [(num_ranks, stage) for num_ranks in (1, 2, 4) for stage in (1, 2, 3)]
    print_bytes("bf16-true", ("ranks", "stage"), every_stage, bytes_held, bytes_by_formula)
