"""The figures of docs/claims.md: what the stored results say about what papers and documentation claim."""

from collections.abc import Callable
from typing import Any

from tests.benchmarks.measure import BENCHMARKS, load
from tests.docs.bench_tables import MIB, limit_seconds, row_of

NO_GPU = "Not run on a GPU."
HOLDS, FAILS, PARTLY = "**Holds.**", "**Does not hold here.**", "**Holds in part.**"

Found = dict[str, Any]
"""A stored result."""


def verdict(holds: bool) -> str:
    return HOLDS if holds else FAILS


def table_of(found: Found) -> list[list[float]]:
    """Return the rows of numbers of a printed table."""
    lines = found["printed"].splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("---"))
    return [[float(word) for word in line.split()] for line in lines[start + 1 :]]


def _on_four_nodes(found: Found, algorithm: str) -> tuple[list[float], float]:
    """Return what each rank sends for 25 MiB, in sizes of the tensor, and the seconds."""
    result: Found = found["json"][1]
    assert result["num_ranks"] == 4
    row = row_of(result, algorithm=algorithm, wire="fp32", size_bytes=25 * MIB)
    return [number / row["size_bytes"] for number in row["sent_bytes"]], row["seconds"]


def ring(found: Found) -> str:
    sent, seconds = _on_four_nodes(found, "ring")
    return (
        f"{verdict(max(sent) < 1.52)} On 4 nodes, each rank sends {max(sent):.2f} sizes of "
        "the tensor; the formula gives 1.50. Over links of 1 Gbit/s, 25 MiB take "
        f"{seconds / limit_seconds(4, 25 * MIB):.2f} times what the links allow."
    )


def master(found: Found) -> str:
    sent, seconds = _on_four_nodes(found, "reduce_broadcast")
    multiple = seconds / _on_four_nodes(found, "ring")[1]
    return (
        f"{verdict(sent[0] > 2.5 and multiple > 1.5)} On 4 nodes, rank 0 sends {sent[0]:.2f} sizes of the tensor, and "
        f"the others {max(sent[1:]):.2f}. Over links of 1 Gbit/s, 25 MiB take {multiple:.2f} times as long as the ring."
    )


def zero_memory(found: Found) -> str:
    rows = [row for row in table_of(found) if row[0] == 4]
    elements = table_of(found)[0][2] / 2  # MB of parameters in bf16
    ours = [sum(row[2::2]) / elements for row in rows]
    formula = [sum(row[3::2]) / elements for row in rows]
    shown = ", ".join(f"{one:.2f} ({other:g})" for one, other in zip(ours, formula, strict=True))
    worst = max(one / other - 1 for one, other in zip(ours, formula, strict=True))
    return (
        f"{verdict(worst < 0.02)} Bytes per parameter of parameters, gradients and Adam's states in stages 1, 2 and 3 "
        f"on 4 ranks, and by the formula: {shown}. Counted from live tensors, on CPU."
    )


def zero_traffic(found: Found) -> str:
    rows = [row for row in table_of(found) if row[0] == 4]
    sent = [row[2] for row in rows]
    shown = ", ".join(f"{number:.2f}" for number in sent)
    return (
        f"{verdict(all(abs(row[2] / row[3] - 1) < 0.02 for row in rows))} In stages 1, 2 and 3, each of 4 ranks sends "
        f"{shown} sizes of the model in a step; an all-reduce would send 1.50."
    )


def offload(found: Found) -> str:
    plans = found["json"]
    rows = list(plans[0]["strategies"])
    fits = {
        plan["device_memory"] >> 30: {(row["strategy"], row["recomputes"]): row["fits"] for row in plan["strategies"]}
        for plan in plans
    }
    parts = []
    for row in rows:
        which = (row["strategy"], row["recomputes"])
        on = [f"{memory}" for memory, each in fits.items() if each[which]]
        name = f"`{row['strategy']}`" + (" recomputing activations" if row["recomputes"] else "")
        where = f"fits {', '.join(on)} GiB" if on else "fits none"
        parts.append(f"{name} {row['peak_bytes'] / 2**30:.1f} GiB, {where}")
    holds = any(row["fits"] for row in plans[0]["strategies"] if row["strategy"] == "paral_zero2_offload")
    said = "Planned to hold" if holds else "Planned not to hold"
    host = max(row["host_bytes"] for row in rows) / 2**30
    return (
        f"**{said}. {NO_GPU}** {plans[0]['states']['parameters'] / 1e9:.1f} B parameters, bf16, one sample of 1024 "
        f"tokens: {'; '.join(parts)}. The host needs {host:.0f} GiB."
    )


def activations(found: Found) -> str:
    rows = table_of(found)
    best = max(row[3] for row in rows)
    said = HOLDS if best >= 100 else PARTLY if best >= 10 else FAILS
    shown = "; ".join(
        f"{row[0]:.0f} blocks: {row[1]:.0f} MB become {row[2]:.0f} MB, a factor of {row[3]:.1f}" for row in rows
    )
    return f"{said} Peaks of a GPT of width 128 on CPU, which include the block that is being recomputed. {shown}."


def all_gather(found: Found) -> str:
    (even, gathering), (uneven, casting) = (_on_four_nodes(found, name) for name in ("all_gather", "broadcast"))
    holds = max(even) - min(even) < 0.02 and max(uneven) > max(even) and casting > gathering
    return (
        f"{verdict(holds)} On 4 nodes, every rank sends {max(even):.2f} sizes of the parameter over "
        f"its own link in an all-gather. In a broadcast from the owner, ranks send {min(uneven):.2f} to "
        f"{max(uneven):.2f}. Over links of 1 Gbit/s, 25 MiB take {gathering * 1e3:.0f} ms and "
        f"{casting * 1e3:.0f} ms. The paper means links to host memory and NVMe. {NO_GPU}"
    )


FIGURES: dict[str, tuple[str, Callable[[Found], str]]] = {
    "ring": ("all_reduce", ring),
    "master": ("all_reduce", master),
    "zero_memory": ("zero_memory", zero_memory),
    "zero_traffic": ("zero_traffic", zero_traffic),
    "offload": ("plan_13b", offload),
    "activations": ("activation_memory", activations),
    "all_gather": ("all_reduce", all_gather),
}
"""For each block of the page, the benchmark, and a function that returns our figure and whether the claim holds."""


def blocks_of_claims() -> dict[str, str]:
    """Return the generated blocks of the page."""
    blocks = {}
    for name, (benchmark, figure) in FIGURES.items():
        record = load()[benchmark]
        commands = "<br>\n".join(f"`{line}`" for line in BENCHMARKS[benchmark])
        blocks[name] = f"{figure(record)}\n\n{commands}, {record['date']}"
    return blocks
