"""The JSON of `paral bench`, as tables of Markdown."""

from collections.abc import Callable
from typing import Any

LINK_BYTES_PER_SECOND = 125e6
"""The links of `tests.benchmarks.all_reduce`: 1 Gbit/s."""
MIB = 2**20


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def step_table(results: list[dict[str, Any]]) -> str:
    """Return a row for each strategy, with the ratio to the hand-written loop."""
    rows = []
    for found in results:
        for row in found["rows"]:
            ratio = "" if row["ratio_to_raw"] is None else f"{row['ratio_to_raw']:.3f}"
            rows.append([f"`{row['strategy']}`", f"{row['seconds'] * 1e3:.0f}", ratio])
    return _table(["", "ms", "ratio"], rows)


def limit_seconds(num_ranks: int, size_bytes: int) -> float:
    """Return the least time of an all-reduce in fp32 over the links between nodes."""
    return 2 * (num_ranks - 1) / num_ranks * size_bytes / LINK_BYTES_PER_SECOND


def nodes_table(results: list[dict[str, Any]]) -> str:
    """Return times between nodes in ms, with the multiple of the limit, and what the busiest rank sends."""
    columns = [(found, size) for found in results for size in dict.fromkeys(row["size_bytes"] for row in found["rows"])]
    headers = [f"{found['num_ranks']} nodes, {size / MIB:g} MiB" for found, size in columns]
    limits = [f"{limit_seconds(found['num_ranks'], size) * 1e3:.1f}" for found, size in columns]
    rows = [["limit", *limits, ""]]
    for case in dict.fromkeys((row["algorithm"], row["wire"]) for row in results[0]["rows"]):
        cells = []
        for found, size in columns:
            seconds = row_of(found, *case, size)["seconds"]
            beside = "" if not is_all_reduce(case[0]) else f" ({seconds / limit_seconds(found['num_ranks'], size):.2f})"
            cells.append(f"{seconds * 1e3:.1f}{beside}")
        sent = row_of(columns[-1][0], *case, columns[-1][1])
        rows.append([_label(*case), *cells, f"{max(sent['sent_bytes']) / sent['size_bytes']:.2f}"])
    return _table(["", *headers, f"sent, {columns[-1][0]['num_ranks']} nodes"], rows)


def row_of(found: dict[str, Any], algorithm: str, wire: str, size: int) -> dict[str, Any]:
    """Return the row of a case."""
    wanted = (algorithm, wire, size)
    row: dict[str, Any] = next(r for r in found["rows"] if (r["algorithm"], r["wire"], r["size_bytes"]) == wanted)
    return row


def is_all_reduce(algorithm: str) -> bool:
    """Return whether an algorithm of `paral bench comm` is an all-reduce."""
    return not algorithm.startswith(("reduce_scatter", "all_gather", "broadcast"))


def _label(algorithm: str, wire: str) -> str:
    return f"`{algorithm}`" + ("" if wire == "fp32" else f", {wire} on the wire")


def loopback_table(results: list[dict[str, Any]]) -> str:
    """Return the ring's time as a multiple of that of the backend's own all-reduce."""
    sizes = list(dict.fromkeys(row["size_bytes"] for row in results[0]["rows"]))
    rows = []
    for found in results:
        ratios = [
            row_of(found, "ring", "fp32", size)["seconds"] / row_of(found, "native", "fp32", size)["seconds"]
            for size in sizes
        ]
        rows.append([f"{found['num_ranks']} ranks", *(f"{ratio:.2f}" for ratio in ratios)])
    headers = ["the ring's time as a multiple of gloo's own", *(f"{size / MIB:g} MiB" for size in sizes)]
    return _table(headers, rows)


def checkpoint_table(results: list[dict[str, Any]]) -> str:
    """Return the times of checkpoints, each beside what it is compared with."""
    rows = []
    for found in results:
        for row in found["rows"]:
            size = f"{row['size_bytes'] / 1e9:.1f} GB"
            for name, beside, what, other in (
                ("save", "full", f"save of {size}", '`form="full"`: gathering on rank 0'),
                ("stall", "save", "`async_save=True`, until training goes on", "the same save, synchronous"),
                ("save", "write", "save", "one process writing the whole"),
                ("load", "read", "load, checksums included", "one process reading the whole, and keeping none"),
                (
                    "consolidate",
                    "write",
                    "`paral consolidate`",
                    "one process writing the whole",
                ),
            ):
                ratio = row[name] / row[beside]
                rows.append([what, f"{row[name]:.2f}", other, f"{row[beside]:.2f}", f"{ratio:.2f}"])
    return _table(["", "s", "against", "s", "ratio"], rows)


def adam_table(results: list[dict[str, Any]]) -> str:
    """Return the time of a step, and of torch's implementations as multiples."""
    (found,) = results
    names = list(dict.fromkeys(row["optimizer"] for row in found["rows"]))
    rows = []
    for threads, size in dict.fromkeys((row["num_threads"], row["num_params"]) for row in found["rows"]):
        cells = []
        for name in names:
            row = adam_row(found, name, threads, size)
            cells.append(f"{row['seconds'] * 1e3:.1f}" + ("" if row["ratio"] == 1 else f" ({row['ratio']:.2f})"))
        rows.append([f"{size / 1e6:g} M", str(threads), *cells])
    return _table(["parameters", "threads", *(f"`{name}`" for name in names)], rows)


def adam_row(found: dict[str, Any], optimizer: str, threads: int, size: int) -> dict[str, Any]:
    """Return the row of a case."""
    wanted = (optimizer, threads, size)
    row: dict[str, Any] = next(
        r for r in found["rows"] if (r["optimizer"], r["num_threads"], r["num_params"]) == wanted
    )
    return row


def plan_table(results: list[dict[str, Any]]) -> str:
    """Return the planned memory of each strategy, and on which devices it fits."""
    rows = []
    for number, row in enumerate(results[0]["strategies"]):
        fits = ["yes" if found["strategies"][number]["fits"] else "no" for found in results]
        name = f"`{row['strategy']}`" + (", recomputing activations" if row["recomputes"] else "")
        rows.append([name, f"{row['peak_bytes'] / 2**30:.1f}", f"{row['host_bytes'] / 2**30:.0f}", *fits])
    devices = [f"fits {found['device_memory'] / 2**30:.0f} GiB" for found in results]
    return _table(["", "device, GiB", "host, GiB", *devices], rows)


def memory_table(results: list[dict[str, Any]]) -> str:
    """Return peak memory beside the limit, the formula and the plan, and the time to the first step."""
    (found,) = results
    rows = []
    for row in found["rows"]:
        sizes = [f"{row[f'{kind}_bytes'] / 1e6:.0f}" for kind in ("formula", "peak", "planned", "start")]
        limit = row["peak_bytes"] / row["limit_bytes"]
        # The limit holds for what shards states; the others are compared with DDP.
        ratio = f"{limit:.2f}" if row["is_sharded"] else ""
        cells = [str(row["num_ranks"]), f"`{row['strategy']}`", *sizes, ratio, f"{row['start_seconds']:.1f}"]
        rows.append(cells)
    headers = [
        "ranks",
        "",
        "formula",
        "peak",
        "planned",
        "before the first step",
        "peak / limit",
        "s to the first step",
    ]
    return _table(headers, rows)


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "all_reduce": nodes_table,
    "all_reduce_loopback": loopback_table,
    "checkpoint": checkpoint_table,
    "memory": memory_table,
    "adam": adam_table,
    "plan_13b": plan_table,
}
"""The function that makes the table of a result; `step_table` for those that are not listed."""
