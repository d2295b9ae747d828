"""Results of the GPU benchmark as markdown tables."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

from tests.benchmarks.gpu_loops import COUNTERPARTS
from tests.benchmarks.gpu_models import SIZES

_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 floating-point operations per second, by GPU name."""


def tables(content: Mapping[str, Any]) -> str:
    """Return all results as markdown."""
    parts = []
    flops = next((value for name, value in _FLOPS.items() if name in str(content.get("gpu"))), None)
    for size, found in content.get("steps", {}).items():
        seconds = {name: _all(blocks, "seconds") for name, blocks in found.items()}
        rows = []
        for name, blocks in found.items():
            peak = max((block["peak_bytes"] / 1e9 for block in blocks if block.get("peak_bytes")), default=None)
            rows.append([name, *_speed(size, name, seconds, flops), peak, _note(blocks)])
        headers = ("", "blocks", "tokens/s", "MFU", "ms", "to its loop", "peak, GB", "")
        parts.append(_table(f"{_about(size)}, {SIZES[size].tokens_per_step} tokens a step", headers, rows, ".3f"))
    return "\n\n".join(parts)


def _about(size: str) -> str:
    return f"GPT of {SIZES[size].num_parameters / 1e6:,.1f} M parameters"


def _table(title: str, headers: Sequence[str], rows: list[list[Any]], floatfmt: str) -> str:
    return f"{title}\n\n{tabulate(rows, headers=headers, tablefmt='github', floatfmt=floatfmt)}"


def _all(blocks: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [value for block in blocks for value in block.get(key, ())]


def _speed(size: str, name: str, seconds: Mapping[str, list[float]], flops: float | None) -> list[Any]:
    mine = seconds[name]
    if not mine:
        return [0, None, None, None, None]
    step = median(mine)
    tokens = SIZES[size].tokens_per_step / step
    mfu = None if flops is None else f"{100 * tokens * SIZES[size].flops_per_token / flops:.1f} %"
    by_hand = seconds.get(COUNTERPARTS.get(name, ""))
    ratio = step / median(by_hand) if by_hand else None
    return [len(mine), f"{tokens:,.0f}", mfu, step * 1e3, ratio]


def _note(found: Sequence[Mapping[str, Any]]) -> str:
    notes = {key: one[key] for one in found for key in ("failed", "skipped") if key in one}
    return "; ".join(f"{key}: {(str(value).strip().splitlines() or [''])[-1][:80]}" for key, value in notes.items())
