"""Choose a strategy that fits into the memory of a device: the cheapest in traffic, or the fastest by times."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_paral.planning.estimate import Estimate
from lightning_paral.planning.layout import LAYOUTS, Layout
from lightning_paral.quantities import format_bytes, format_seconds

MARGIN = 0.1
"""The fraction of the device's memory that stays free, for what is not planned: libraries, and fragmentation."""
_DISTANCE = {"device": 0, "host": 1, "nvme": 2}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Which strategy to use, and why."""

    chosen: Estimate | None
    """`None` if nothing fits, or if the memory is unknown."""
    text: str
    """Sentences for the user."""


def candidates(*, on_cpu: bool, several_optimizers: bool = False, recomputes: bool = True) -> tuple[Layout, ...]:
    """Return the layouts among which a recommendation is made.

    DP and the ring cost as much memory as DDP, so they are left out.

    Args:
        on_cpu: whether the device is the CPU: offloading to host memory saves nothing there.
        several_optimizers: whether the module has several, which cannot be on NVMe.
        recomputes: whether the module has repeated blocks whose activations can be recomputed.
    """
    chosen = []
    for layout in LAYOUTS:
        if layout.engine == "dp" or layout.all_reduce == "ring":
            continue
        if layout.optimizer_place == "nvme" and several_optimizers:
            continue
        if on_cpu and "host" in (layout.optimizer_place, layout.parameter_place):
            continue
        chosen += [layout, layout.recomputing()] if recomputes else [layout]
    return tuple(chosen)


def cost(estimate: Estimate) -> tuple[int, bool, int, int]:
    """Return what makes a layout expensive, most important first: offloading, recomputation, bytes on the wire."""
    layout = estimate.layout
    distance = max(_DISTANCE[layout.optimizer_place], _DISTANCE[layout.parameter_place])
    order = [each.strategy for each in LAYOUTS].index(layout.strategy)
    return distance, layout.recomputes, estimate.wire_bytes, order


def time_and_cost(estimate: Estimate) -> tuple[bool, float, tuple[int, bool, int, int]]:
    """Return what makes a layout slow: its predicted time if it is known. Others are last, ordered by their cost."""
    return estimate.seconds is None, estimate.seconds or 0.0, cost(estimate)


def usable(device_memory: int) -> float:
    """Return how many bytes of a device's memory a rank may use: all but the margin."""
    return (1 - MARGIN) * device_memory


def fits(estimate: Estimate, device_memory: int) -> bool:
    """Return whether the rank's peak leaves the margin of the device's memory, a number of bytes."""
    return estimate.memory.peak_bytes <= usable(device_memory)


def advise(
    estimates: Sequence[Estimate], device_memory: int | None, max_batches: dict[str, int] | None = None
) -> Advice:
    """Return a recommendation: what fits and is the fastest if times were predicted, or else the cheapest in traffic.

    Args:
        estimates: of the candidates.
        device_memory: bytes of a device; `None` if unknown.
        max_batches: the largest batch per rank that fits, by the name of the layout, if it is known.
    """
    ordered = sorted(estimates, key=time_and_cost)
    if device_memory is None:
        least = min(ordered, key=lambda each: each.memory.peak_bytes)
        return Advice(
            chosen=None,
            text=f"Give the memory of a device, for example --device-memory 80GiB, for a recommendation. "
            f"{least.layout.name} needs the least, {format_bytes(least.memory.peak_bytes)}.",
        )
    limit = f"{format_bytes(usable(device_memory))} ({format_bytes(device_memory)} less {MARGIN:.0%})"
    dismissed: list[str] = []
    for each in ordered:
        if fits(each, device_memory):
            text = f"Use {describe(each.layout)}: it needs {format_bytes(each.memory.peak_bytes)} of {limit}"
            if each.seconds is None:
                text += "." if not dismissed else f". Cheaper, but too large: {', '.join(dismissed)}."
            else:
                text += f", and its predicted step of {format_seconds(each.seconds)} is the shortest of those that fit."
                text += f" Faster, but too large: {', '.join(dismissed)}." if dismissed else ""
            return Advice(chosen=each, text=text)
        dismissed.append(f"{each.layout.name} ({format_bytes(each.memory.peak_bytes)})")
    least = min(ordered, key=lambda each: each.memory.peak_bytes)
    text = f"Nothing fits into {limit}. {least.layout.name} needs the least, {format_bytes(least.memory.peak_bytes)}. "
    sizes = {name: size for name, size in (max_batches or {}).items() if size > 0}
    if sizes:
        name = max(sizes, key=lambda name: sizes[name])
        samples = "1 sample" if sizes[name] == 1 else f"{sizes[name]} samples"
        text += f"With at most {samples} per rank and batch, {name} fits; accumulate_grad_batches restores the size."
    else:
        text += "Use more ranks, smaller batches, 16-bit precision, or devices with more memory."
    return Advice(chosen=None, text=text)


def describe(layout: Layout) -> str:
    """Return how to select a layout in Python."""
    if layout.label:
        return f"the {layout.label} strategy"
    if not layout.recomputes:
        return f'strategy="{layout.strategy}"'
    return f'strategy="{layout.strategy}" with activation_checkpointing=ActivationCheckpointing()'
