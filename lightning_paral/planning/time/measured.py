"""Read what `paral bench ... --json` has measured."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.following import FollowedSteps
from lightning_paral.planning.time.passes import StepEvents

_ADAM_BYTES = 16
"""Bytes of an fp32 parameter, its gradient, and the two states of Adam."""


def read_measured(paths: Iterable[str], followed: FollowedSteps, module_name: str) -> dict[str, float]:
    """Return the fields of `Machine` that the files determine.

    `paral bench comm` gives the link and its latency, `paral bench step` the FLOP/s of its `raw_ddp` with one rank, and
    `paral bench adam` the bandwidth of the optimizer.

    Args:
        paths: files with what `paral bench comm --json`, `step --json` or `adam --json` has printed.
        followed: the step of the planned module, which is also the one that `paral bench step` has to have measured.
        module_name: the name of its class.

    Raises:
        ConfigurationError: a file cannot be read, or does not have the figures.
    """
    found: dict[str, float] = {}
    for path in paths:
        record = _read(path)
        kind = record.get("benchmark")
        try:
            if kind == "comm":
                found["latency"], found["link"] = fit_link(record["rows"], record["num_ranks"], path)
            elif kind == "step":
                found["flops"] = _flops(record, followed, module_name, path)
            elif kind == "adam":
                best = max(record["rows"], key=lambda row: (row["num_params"], -row["seconds"]))
                found["optimizer_bandwidth"] = _ADAM_BYTES * best["num_params"] / best["seconds"]
            else:
                raise KeyError("benchmark")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"--measured {path}: it does not have the figures of `paral bench comm`, `step` or `adam` ({error!r}). "
                "Give what one of them has printed with --json."
            ) from error
    return found


def fit_link(rows: Sequence[dict[str, Any]], num_ranks: int, path: str) -> tuple[float, float]:
    """Return the latency in seconds and the bandwidth in bytes per second of the backend's fp32 all-reduce.

    They are those of the line t = 2(N-1) latency + 2(N-1)/N bytes/bandwidth that is nearest to the measured times, with
    each difference relative to the time.

    Args:
        rows: rows of `CommResults`.
        num_ranks: the number of ranks N.
        path: the file, for errors.

    Raises:
        ConfigurationError: there are fewer than two sizes.
    """
    points = [
        (row["size_bytes"], row["seconds"]) for row in rows if row["algorithm"] == "native" and row["wire"] == "fp32"
    ]
    if len({size for size, _ in points}) < 2 or num_ranks < 2:
        raise ConfigurationError(
            f"--measured {path}: the latency and the bandwidth need the native all-reduce in fp32 of two sizes or "
            "more. Measure with `paral bench comm --algorithms native --wire fp32 --json`."
        )
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(weight * size for weight, (size, _) in zip(weights, points, strict=True)) / total
    mean_time = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (size - mean_size) ** 2 for weight, (size, _) in zip(weights, points, strict=True))
    slope = (
        sum(
            weight * (size - mean_size) * (seconds - mean_time)
            for weight, (size, seconds) in zip(weights, points, strict=True)
        )
        / spread
    )
    if slope <= 0:
        raise ConfigurationError(
            f"--measured {path}: larger tensors did not take longer. Measure larger --sizes, or give --link."
        )
    steps = 2 * (num_ranks - 1)
    return max(0.0, mean_time - slope * mean_size) / steps, steps / num_ranks / slope


def _flops(record: dict[str, Any], followed: FollowedSteps, module_name: str, path: str) -> float:
    rows = [row for row in record["rows"] if row["strategy"] == "raw_ddp"]
    if not rows or record["num_ranks"] != 1:
        raise ConfigurationError(
            f"--measured {path}: the FLOP/s are those of a step without communication. Measure with `paral bench step "
            "--strategies raw_ddp --ranks 1 --json` and the same --config."
        )
    measured = (record["module"], record["num_params"])
    planned = (module_name, followed.states.num_params)
    if measured != planned or followed.batch_size is None:
        raise ConfigurationError(
            f"--measured {path}: it measured {measured[0]} with {measured[1]:,} parameters, but the plan is for "
            f"{planned[0]} with {planned[1]:,}. Measure the same --config, or give --flops."
        )
    micro_batches = max(1, len(StepEvents(followed.plain).passes))
    flops_of_sample = followed.plain.flops / micro_batches / followed.batch_size
    return float(flops_of_sample * record["batch_size"] / rows[0]["seconds"])


def _read(path: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--measured {path} cannot be read as JSON: {error}.") from error
    if not isinstance(record, dict):
        raise ConfigurationError(f"--measured {path} is not what `paral bench ... --json` prints.")
    return record
