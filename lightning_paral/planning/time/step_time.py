"""The predicted time of a step."""

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.collectives import Collectives
from lightning_paral.planning.time.ddp import DDPStep
from lightning_paral.planning.time.fsdp import FSDPStep
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.zero import ZeROStep


def step_seconds(
    layout: Layout,
    events: StepEvents,
    states: ModelStates,
    num_ranks: int,
    settings: StepSettings,
    machine: Machine,
    *,
    on_cpu: bool,
) -> float | None:
    """Return the predicted seconds of an optimizer step, with all its micro-batches.

    Args:
        layout: the strategy.
        events: a step with the batch of one rank.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks.
        settings: the Trainer's settings.
        machine: how fast ranks compute and communicate.
        on_cpu: whether the device is the CPU, and the backend gloo.

    Returns:
        float | None: `None` if the operations of the step are unknown, or if the time depends on links that `machine`
        does not have: between a device and host memory or NVMe, and, under DP, between devices of a process; or if the
        ranks cannot be divided into the replicas of the layout.
    """
    is_on_device = on_cpu and "nvme" not in (layout.optimizer_place, layout.parameter_place)
    if not events.timeline.flops or not (is_on_device or not layout.is_offloaded):
        return None
    if (layout.engine == "dp" and num_ranks > 1) or num_ranks % layout.replicas:
        return None
    step = _make(layout, events, states, settings, num_ranks, machine, on_cpu=on_cpu)
    first, *others = events.passes
    step.run(first, is_last=not others)
    if others:
        # The timeline has two micro-batches. Those between the first and the last one take as long as the first.
        repeated = step.streams.now * (settings.accumulate - len(others) - 1)
        for number, each in enumerate(others, 1):
            step.run(each, is_last=number == len(others))
    else:
        repeated = 0.0
    step.end()
    if machine.optimizer_bandwidth is not None:
        is_sharded = layout.engine in ("fsdp", "zero")
        touched = states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes
        step.streams.compute(touched / (num_ranks if is_sharded else 1) / machine.optimizer_bandwidth)
    step.end_step()
    return step.streams.now + repeated


def _make(
    layout: Layout,
    events: StepEvents,
    states: ModelStates,
    settings: StepSettings,
    num_ranks: int,
    machine: Machine,
    *,
    on_cpu: bool,
) -> DDPStep | FSDPStep | ZeROStep:
    units = events.timeline.units
    collectives = Collectives(machine, num_ranks, on_cpu=on_cpu)
    if layout.engine in ("dp", "ddp"):
        return DDPStep(states, collectives, machine.flops, layout)
    if layout.engine == "fsdp":
        num_shards = num_ranks // layout.replicas
        shards = Collectives(machine, num_shards, on_cpu=on_cpu)
        replicas = Collectives(machine.every(num_shards), layout.replicas, on_cpu=on_cpu)
        return FSDPStep(
            states, units, settings, shards, replicas, machine.flops, reshards=layout.reshards, on_cpu=on_cpu
        )
    return ZeROStep(states, units, collectives, machine.flops, layout=layout, on_cpu=on_cpu)
