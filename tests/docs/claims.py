"""docs/claims.md: what papers and documentation claim, beside what the stored results say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.measure import BENCHMARKS
from tests.benchmarks.results import load
from tests.docs.bench_tables import adam_row, limit_seconds, row_of

LARGEST = 25 * 2**20
DEEPSPEED = "DeepSpeedCPUAdam"
NO_GPU = "Not run on a GPU."
HOLDS, FAILS, PARTLY = "**Holds.**", "**Does not hold here.**", "**Holds in part.**"

Found = dict[str, Any]
"""A stored result."""


@dataclass(frozen=True)
class Claim:
    """A row of the page."""

    text: str
    source: str
    benchmark: str
    figure: Callable[[Found], str]
    """Returns our figure, which starts with whether the claim holds."""


def verdict(holds: bool) -> str:
    return HOLDS if holds else FAILS


def table_of(found: Found) -> list[list[float]]:
    """Return the rows of numbers of a printed table."""
    lines = found["printed"].splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("---"))
    return [[float(word) for word in line.split()] for line in lines[start + 1 :]]


def _four_nodes(found: Found) -> Found:
    result: Found = found["json"][1]
    assert result["num_ranks"] == 4
    return result


def _sent(row: Found) -> list[float]:
    return [number / row["size_bytes"] for number in row["sent_bytes"]]


def ring(found: Found) -> str:
    row = row_of(_four_nodes(found), "ring", "fp32", LARGEST)
    sent, multiple = _sent(row), row["seconds"] / limit_seconds(4, LARGEST)
    return (
        f"{verdict(max(sent) < 1.52)} On 4 nodes, each rank sends {max(sent):.2f} sizes of "
        f"the tensor; the formula gives 1.50. Over links of 1 Gbit/s, 25 MiB take {multiple:.2f} times what the links "
        "allow."
    )


def master(found: Found) -> str:
    four = _four_nodes(found)
    row = row_of(four, "reduce_broadcast", "fp32", LARGEST)
    sent, multiple = _sent(row), row["seconds"] / row_of(four, "ring", "fp32", LARGEST)["seconds"]
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


def adam(found: Found) -> str:
    (result,) = found["json"]
    cases = dict.fromkeys((row["num_threads"], row["num_params"]) for row in result["rows"])

    def span(name: str) -> tuple[float, float]:
        ratios = [adam_row(result, name, *case)["ratio"] for case in cases]
        return min(ratios), max(ratios)

    spans = {name: span(name) for name in ("loop", "foreach", "fused")}
    within = [low >= 5 for low, _ in spans.values()]
    said = HOLDS if all(within) else FAILS if max(high for _, high in spans.values()) < 5 else PARTLY
    shown = ", ".join(f"`{name}` {low:.1f} to {high:.1f}" for name, (low, high) in spans.items())
    sizes = [f"{size / 1e6:g} M" for size in (min(c[1] for c in cases), max(c[1] for c in cases))]
    return (
        f"{said} With {sizes[0]} to {sizes[1]} parameters and 1 and 2 threads, torch's AdamW takes as many times as "
        f"long as `{DEEPSPEED}`: {shown}."
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
    four = _four_nodes(found)
    gathered, cast = (row_of(four, name, "fp32", LARGEST) for name in ("all_gather", "broadcast"))
    even, uneven = _sent(gathered), _sent(cast)
    holds = max(even) - min(even) < 0.02 and max(uneven) > max(even) and cast["seconds"] > gathered["seconds"]
    return (
        f"{verdict(holds)} On 4 nodes, every rank sends {max(even):.2f} sizes of the parameter over "
        f"its own link in an all-gather. In a broadcast from the owner, ranks send {min(uneven):.2f} to "
        f"{max(uneven):.2f}. Over links of 1 Gbit/s, 25 MiB take {gathered['seconds'] * 1e3:.0f} ms and "
        f"{cast['seconds'] * 1e3:.0f} ms. The paper means links to host memory and NVMe. {NO_GPU}"
    )


ZERO = "[ZeRO, arXiv:1910.02054](https://arxiv.org/abs/1910.02054)"
INFINITY = "[ZeRO-Infinity, arXiv:2104.07857](https://arxiv.org/abs/2104.07857)"
CLAIMS = (
    Claim(
        "In a ring all-reduce among N ranks, each sends 2(N-1)/N of the tensor, which is the least possible",
        "[Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)",
        "all_reduce",
        ring,
    ),
    Claim(
        "Reducing to one master and broadcasting from it takes time in proportion to N: the master's link is the "
        "bottleneck",
        "[Gibiansky, 2017](https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/)",
        "all_reduce",
        master,
    ),
    Claim(
        "In mixed precision, a rank holds 4 + 12/N bytes per parameter in ZeRO's stage 1, 2 + 14/N in stage 2, and "
        "16/N in stage 3",
        f"{ZERO}, figure 1",
        "zero_memory",
        zero_memory,
    ),
    Claim(
        "ZeRO's stages 1 and 2 send as much as data parallelism, and stage 3 sends 1.5 times as much",
        f"{ZERO}, section 7",
        "zero_traffic",
        zero_traffic,
    ),
    Claim(
        "ZeRO-Offload trains models of over 13 B parameters on a single GPU",
        "[ZeRO-Offload, arXiv:2101.06840](https://arxiv.org/abs/2101.06840)",
        "plan_13b",
        offload,
    ),
    Claim(
        "`DeepSpeedCPUAdam` is 5 to 7 times as fast as `torch.optim.Adam` and `AdamW`",
        "[DeepSpeed's documentation](https://deepspeed.readthedocs.io/en/latest/optimizers.html)",
        "adam",
        adam,
    ),
    Claim(
        "With activation checkpointing, what is kept is orders of magnitude smaller than all activations",
        f"{INFINITY}, section 3",
        "activation_memory",
        activations,
    ),
    Claim(
        "Gathering a sharded parameter uses the links of all ranks; broadcasting it from an owner uses one",
        f"{INFINITY}, section 6.1",
        "all_reduce",
        all_gather,
    ),
)


def blocks_of_claims() -> dict[str, str]:
    """Return the generated block of the page."""
    found = load()
    lines = ["| claim | source | our figure | command |", "|---|---|---|---|"]
    for claim in CLAIMS:
        record = found[claim.benchmark]
        commands = "<br>".join(f"`{line}`" for line in BENCHMARKS[claim.benchmark].command.split(" && "))
        lines.append(f"| {claim.text} | {claim.source} | {claim.figure(record)} | {commands}, {record['date']} |")
    return {"claims": "\n".join(lines)}
