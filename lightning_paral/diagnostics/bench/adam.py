"""`paral bench adam`: time steps of DeepSpeedCPUAdam beside those of torch.optim.AdamW on the host."""

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_paral.diagnostics.bench.names import check_names
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.engines.zero.runtime.deepspeed import check_installed, choose_accelerator
from lightning_paral.engines.zero.runtime.operators import check_compiler, keep_operators, load_operator
from lightning_paral.errors import ConfigurationError

DEEPSPEED, LOOP = "DeepSpeedCPUAdam", "loop"
OPTIMIZERS = (DEEPSPEED, "fused", "foreach", LOOP)
"""DeepSpeed's, and three implementations of `torch.optim.AdamW`; `loop` updates one tensor after the other."""
DEFAULT_SIZES = (1_000_000, 10_000_000, 50_000_000, 200_000_000)
TENSOR_ELEMENTS = 1_000_000
"""The number of elements of each tensor, about those of a layer of a Transformer of width 1024."""
BYTES_PER_PARAMETER = 32
"""fp32 parameters, gradients and two states, and temporary tensors of up to twice the parameters."""
_SECONDS = 10.0
_LEAST_ROUNDS = 3
_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamRow:
    """The time of a step of one implementation."""

    optimizer: str
    num_threads: int
    num_params: int
    seconds: float
    """The median over rounds."""
    num_rounds: int
    ratio: float | None
    """The time of DeepSpeedCPUAdam's step divided into this one; `None` if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class AdamResults:
    """The result of `paral bench adam`."""

    rows: tuple[AdamRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def check_adam(optimizers: Sequence[str], threads: Sequence[int]) -> None:
    """Check the options of the benchmark.

    Raises:
        ConfigurationError: a name is unknown, a number of threads is not positive, or DeepSpeedCPUAdam cannot be
            compiled here.
    """
    check_names("--optimizers", optimizers, OPTIMIZERS)
    for number in threads:
        if number < 1:
            raise ConfigurationError(f"--threads {number} is not a number of threads. Give at least 1.")
    if DEEPSPEED in optimizers:
        check_installed()
        check_compiler("paral bench adam", needs_aio=False)


def measure_adam(
    rank: Rank, *, optimizers: Sequence[str], sizes: Sequence[int], rounds: int, seconds: float = _SECONDS
) -> list[dict[str, Any]]:
    """Measure in rounds over all implementations, so that other load falls on all of them.

    All implementations update the same fp32 parameters and states, which fit into memory once.

    Args:
        rank: this process, the only one.
        optimizers: names from `OPTIMIZERS`.
        sizes: numbers of parameters.
        rounds: the number of rounds for each size.
        seconds: the time after which a size gets no further rounds, if it has had three.

    Returns:
        The fields of an `AdamRow` for each size and implementation.
    """
    rows: list[dict[str, Any]] = []
    num_threads = torch.get_num_threads()
    with ExitStack() as stack:
        if DEEPSPEED in optimizers:
            choose_accelerator(torch.device("cpu"))
            load_operator("cpu_adam", "paral bench adam")
            stack.enter_context(keep_operators())
        for size in sizes:
            parameters = [_parameter(part) for part in _parts(size)]
            made = {name: _make(name, parameters) for name in optimizers}
            states: dict[Tensor, dict[str, Tensor]] = {}
            times: dict[str, list[float]] = {name: [] for name in optimizers}
            began = time.perf_counter()
            for number in range(rounds + 1):
                rank.show_progress(f"{size:,} parameters, {num_threads} threads, round {number} of {rounds}")
                for name, optimizer in made.items():
                    start = time.perf_counter()
                    optimizer.step()
                    if number:  # the first step creates the states
                        times[name].append(time.perf_counter() - start)
                    else:
                        _share_states(optimizer, states)
                if number >= _LEAST_ROUNDS and time.perf_counter() - began > seconds:
                    break
            rows += _rows(times, size, num_threads)
    return rows


def _rows(times: dict[str, list[float]], size: int, num_threads: int) -> list[dict[str, Any]]:
    medians = {name: statistics.median(found) for name, found in times.items()}
    reference = medians.get(DEEPSPEED)
    return [
        asdict(
            AdamRow(
                optimizer=name,
                num_threads=num_threads,
                num_params=size,
                seconds=seconds,
                num_rounds=len(times[name]),
                ratio=seconds / reference if reference else None,
            )
        )
        for name, seconds in medians.items()
    ]


def _parts(size: int) -> list[int]:
    whole, rest = divmod(size, TENSOR_ELEMENTS)
    return [TENSOR_ELEMENTS] * whole + ([rest] if rest else [])


def _parameter(num_elements: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(num_elements))
    parameter.grad = torch.randn(num_elements)
    return parameter


def _make(name: str, parameters: list[torch.nn.Parameter]) -> Optimizer:
    if name == DEEPSPEED:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: Optimizer = DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01, adamw_mode=True)
        return made
    return AdamW(parameters, lr=1e-4, weight_decay=0.01, foreach=name == "foreach", fused=name == "fused")


def _share_states(optimizer: Optimizer, states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Replace the states of `optimizer` by those in `states`, or store them there if there are none."""
    for parameter, state in optimizer.state.items():
        shared = states.setdefault(parameter, {name: state[name] for name in _STATES})
        state.update(shared)
