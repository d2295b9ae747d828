"""What a strategy costs on a rank: memory, bytes on the wire, and time."""

from dataclasses import dataclass, replace

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.construction import construction_memory
from lightning_paral.planning.memory.fsdp import fsdp_memory
from lightning_paral.planning.memory.ledger import RankMemory
from lightning_paral.planning.memory.replicated import ddp_memory, dp_memory
from lightning_paral.planning.memory.zero import zero_memory
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.step_time import step_seconds
from lightning_paral.planning.timeline import Timeline
from lightning_paral.planning.traffic import wire_bytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The costs of a layout on one rank."""

    layout: Layout
    memory: RankMemory
    wire_bytes: int
    """Bytes that a rank sends in an optimizer step."""
    seconds: float | None = None
    """The predicted time of an optimizer step; `None` if it is unknown: without a machine, or see `step_seconds`."""


def rank_memory(
    layout: Layout, timeline: Timeline, states: ModelStates, num_ranks: int, settings: StepSettings, *, on_cpu: bool
) -> RankMemory:
    """Return the memory of a rank at its peak: in a step, or while the module is built.

    Args:
        layout: the strategy.
        timeline: a step with the batch of one rank; for a layout that recomputes, with activation checkpointing.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks; for DP, of devices.
        settings: the Trainer's settings.
        on_cpu: whether the device is the CPU, so that offloading to host memory saves nothing.
    """
    in_step = _memory_in_step(layout, timeline, states, num_ranks, settings, on_cpu=on_cpu)
    building = construction_memory(layout, states, num_ranks, on_cpu=on_cpu)
    if building.peak_bytes > in_step.peak_bytes:
        return replace(in_step, by_item=building.by_item)
    return in_step


def _memory_in_step(
    layout: Layout, timeline: Timeline, states: ModelStates, num_ranks: int, settings: StepSettings, *, on_cpu: bool
) -> RankMemory:
    if layout.engine == "dp":
        return dp_memory(timeline, states, num_ranks, devices_are_one=on_cpu)
    if layout.engine == "ddp":
        return ddp_memory(timeline, states, num_ranks, layout)
    if layout.engine == "fsdp":
        return fsdp_memory(timeline, states, num_ranks, settings, layout, on_cpu=on_cpu)
    return zero_memory(timeline, states, num_ranks, settings, layout, on_cpu=on_cpu)


def estimate(
    layout: Layout,
    timeline: Timeline,
    states: ModelStates,
    num_ranks: int,
    settings: StepSettings,
    *,
    on_cpu: bool,
    machine: Machine | None = None,
) -> Estimate:
    """Return all costs of a layout. `machine` is for the time; the other arguments are those of `rank_memory`."""
    seconds = None
    if machine is not None:
        seconds = step_seconds(layout, StepEvents(timeline), states, num_ranks, settings, machine, on_cpu=on_cpu)
    return Estimate(
        layout=layout,
        memory=rank_memory(layout, timeline, states, num_ranks, settings, on_cpu=on_cpu),
        wire_bytes=wire_bytes(layout, states, num_ranks, settings, on_cpu=on_cpu),
        seconds=seconds,
    )
