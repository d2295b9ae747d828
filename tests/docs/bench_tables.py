"""The JSON of `tests/benchmarks`, as tables of Markdown."""

from collections.abc import Callable
from typing import Any

from tests.tables import markdown

LINK_BYTES_PER_SECOND = 125e6
"""The links of `tests.benchmarks.all_reduce`: 1 Gbit/s."""
MIB = 2**20


def row_of(found: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    """Return the row of a result that has these values."""
    row: dict[str, Any] = next(row for row in found["rows"] if all(row[key] == wanted[key] for key in wanted))
    return row


def _values(found: dict[str, Any], *keys: str) -> list[Any]:
    """Return the values of the rows under the keys, each once: tuples if there are several keys."""
    return list(dict.fromkeys(row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys) for row in found["rows"]))


def step_table(results: list[dict[str, Any]]) -> str:
    """Return a row for each strategy, with the ratio to the hand-written loop."""
    rows = []
    for found in results:
        for row in found["rows"]:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
            rows.append([f"`{row['name']}`", f"{row['seconds'] * 1e3:.0f}", ratio])
    return markdown(["", "ms", "ratio"], rows)


def limit_seconds(num_ranks: int, size_bytes: int) -> float:
    """Return the least time of an all-reduce in fp32 over the links between nodes."""
    return 2 * (num_ranks - 1) / num_ranks * size_bytes / LINK_BYTES_PER_SECOND


def nodes_table(results: list[dict[str, Any]]) -> str:
    """Return times between nodes in ms, with the multiple of the limit, and what the busiest rank sends."""
    columns = [(found, size) for found in results for size in _values(found, "size_bytes")]
    limits = [limit_seconds(found["num_ranks"], size) for found, size in columns]
    rows = [["limit", *(f"{limit * 1e3:.1f}" for limit in limits), ""]]
    for algorithm, wire in _values(results[0], "algorithm", "wire"):
        found = [row_of(found, algorithm=algorithm, wire=wire, size_bytes=size) for found, size in columns]
        is_all_reduce = not algorithm.startswith(("reduce_scatter", "all_gather", "broadcast"))
        cells = [
            f"{row['seconds'] * 1e3:.1f}" + (f" ({row['seconds'] / limit:.2f})" if is_all_reduce else "")
            for row, limit in zip(found, limits, strict=True)
        ]
        label = f"`{algorithm}`" + ("" if wire == "fp32" else f", {wire} on the wire")
        rows.append([label, *cells, f"{max(found[-1]['sent_bytes']) / found[-1]['size_bytes']:.2f}"])
    headers = [f"{found['num_ranks']} nodes, {size / MIB:g} MiB" for found, size in columns]
    return markdown(["", *headers, f"sent, {columns[-1][0]['num_ranks']} nodes"], rows)


def loopback_table(results: list[dict[str, Any]]) -> str:
    """Return the ring's time as a multiple of that of the backend's own all-reduce."""
    sizes, rows = _values(results[0], "size_bytes"), []
    for found in results:
        ring, native = (
            [row_of(found, algorithm=name, wire="fp32", size_bytes=size)["seconds"] for size in sizes]
            for name in ("ring", "native")
        )
        ratios = (f"{ours / theirs:.2f}" for ours, theirs in zip(ring, native, strict=True))
        rows.append([f"{found['num_ranks']} ranks", *ratios])
    return markdown(["the ring's time as a multiple of gloo's own", *(f"{size / MIB:g} MiB" for size in sizes)], rows)


def checkpoint_table(results: list[dict[str, Any]]) -> str:
    """Return the times of saving and loading."""
    ((row,),) = (found["rows"] for found in results)
    rows = [
        (f"save of {row['size_bytes'] / 1e9:.1f} GB, sharded", row["save"]),
        ("save with `async_save=True`, until training goes on", row["stall"]),
        ('save with `form="full"`, gathered on rank 0', row["full"]),
        ("load, checksums included", row["load"]),
        ("`paral consolidate`", row["consolidate"]),
    ]
    return markdown(["", "s"], [(what, f"{seconds:.2f}") for what, seconds in rows])


def plan_table(results: list[dict[str, Any]]) -> str:
    """Return the planned memory of each strategy, and on which devices it fits."""
    rows = []
    for number, row in enumerate(results[0]["strategies"]):
        fits = ["yes" if found["strategies"][number]["fits"] else "no" for found in results]
        name = f"`{row['strategy']}`" + (", recomputing activations" if row["recomputes"] else "")
        rows.append([name, f"{row['peak_bytes'] / 2**30:.1f}", f"{row['host_bytes'] / 2**30:.0f}", *fits])
    devices = [f"fits {found['device_memory'] / 2**30:.0f} GiB" for found in results]
    return markdown(["", "device, GiB", "host, GiB", *devices], rows)


def memory_table(results: list[dict[str, Any]]) -> str:
    """Return peak memory beside the formula, and the time to the first step."""
    (found,) = results
    rows = []
    for row in found["rows"]:
        sizes = [f"{row[f'{kind}_bytes'] / 1e6:.0f}" for kind in ("formula", "peak", "start")]
        rows.append([row["num_ranks"], f"`{row['name']}`", *sizes, f"{row['start_seconds']:.1f}"])
    return markdown(["ranks", "", "formula", "peak", "before the first step", "s to the first step"], rows)


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "all_reduce": nodes_table,
    "all_reduce_loopback": loopback_table,
    "checkpoint": checkpoint_table,
    "memory": memory_table,
    "plan_13b": plan_table,
}
"""The function that makes the table of a result; `step_table` for those that are not listed."""
