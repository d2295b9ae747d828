"""Predict the costs of every strategy for a module, and recommend one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.costs import Estimate, estimate
from lightning_paral.planning.fake import StepSettings
from lightning_paral.planning.follow import FollowedSteps, follow_fit, follow_steps, settings_of
from lightning_paral.planning.layout import LAYOUTS, HasLayout, Layout, layouts_of
from lightning_paral.planning.states import ModelStates
from lightning_paral.quantities import format_bytes, parse_bytes
from lightning_paral.tables import make_console, make_table

DeviceType = Literal["cpu", "cuda"]
MARGIN = 0.1
"""The fraction of the device's memory that stays free, for what is not planned: libraries, and fragmentation."""
_DISTANCE = {"device": 0, "host": 1, "nvme": 2}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of each strategy, and a recommendation. `print(plan)` shows a table."""

    module_name: str
    states: ModelStates
    estimates: tuple[Estimate, ...]
    """In the order of the table."""
    chosen: Estimate | None
    """The recommended layout and its costs; `None` if nothing fits, or if the memory is unknown."""
    advice: str
    """The recommendation in a sentence."""
    world_size: int
    device_memory: int | None
    """Bytes; `None` if unknown."""
    device_type: DeviceType
    settings: StepSettings
    batch_size: int | None
    """Samples per batch and rank; `None` if it is unknown, or if no batch was given."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what is not in the figures."""
    max_batches: dict[str, int] = field(default_factory=dict)
    """The largest batch per rank that fits, by the name of the layout, if it was asked for."""

    def of(self, name: str) -> Estimate:
        """Return the estimate of a strategy, such as `paral_fsdp` or `paral_fsdp + recompute`.

        Raises:
            ConfigurationError: it was not planned.
        """
        for each in self.estimates:
            if each.layout.name == name:
                return each
        names = ", ".join(each.layout.name for each in self.estimates)
        raise ConfigurationError(f"The plan has no row {name!r}. It has: {names}.")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; sizes are in bytes."""
        states = self.states
        return {
            "module": self.module_name,
            "world_size": self.world_size,
            "device_type": self.device_type,
            "device_memory": self.device_memory,
            "margin": MARGIN,
            "precision": self.settings.precision,
            "accumulate": self.settings.accumulate,
            "batch_size": self.batch_size,
            "states": {
                "parameters": states.num_params,
                "trained": states.num_trained,
                "parameter_bytes": states.parameter_bytes,
                "gradient_bytes": states.gradient_bytes,
                "optimizer_bytes": states.optimizer_bytes,
                "buffer_bytes": states.buffer_bytes,
            },
            "strategies": [self._row(each) for each in self.estimates],
            "recommended": None if self.chosen is None else self.chosen.layout.name,
            "advice": self.advice,
            "notes": list(self.notes),
        }

    def _row(self, each: Estimate) -> dict[str, Any]:
        return {
            "name": each.layout.name,
            "strategy": each.layout.strategy,
            "is_configured": bool(each.layout.label),
            "options": list(each.layout.options),
            "recomputes": each.layout.recomputes,
            "fits": None if self.device_memory is None else fits(each, self.device_memory),
            "peak_bytes": each.peak_bytes,
            "bytes": each.memory._asdict(),
            "host_bytes": each.host_bytes,
            "nvme_bytes": each.nvme_bytes,
            "wire_bytes": each.wire_bytes,
            "max_batch": self.max_batches.get(each.layout.name),
        }

    def __str__(self) -> str:
        console = make_console()
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def __rich__(self) -> RenderableType:
        most = max(each.peak_bytes for each in self.estimates)
        unit, divisor = next((pair for pair in _UNITS if most >= pair[1]), _UNITS[-1])

        def size(num_bytes: float) -> str:
            value = num_bytes / divisor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

        columns: dict[str, Callable[[Estimate], str]] = {
            "strategy": lambda each: f"[bold]{self._label(each)}[/]" if each is self.chosen else self._label(each)
        }
        if (memory := self.device_memory) is not None:
            columns["fits"] = lambda each: "[green]yes[/]" if fits(each, memory) else "[red]no[/]"
        columns["peak"] = lambda each: size(each.peak_bytes)
        for number, header in enumerate(("params", "grads", "optim", "acts", "comm")):
            columns[header] = lambda each, number=number: size(each.memory[number])  # type: ignore[misc]
        if any(each.host_bytes + each.nvme_bytes for each in self.estimates):
            columns["offl"] = lambda each: size(each.host_bytes + each.nvme_bytes)
        columns["wire"] = lambda each: size(each.wire_bytes)
        if self.max_batches:
            columns["batch"] = lambda each: f"{self.max_batches.get(each.layout.name, 0):,}"
        rows = [[cell(each) for cell in columns.values()] for each in self.estimates]
        legend = (
            f"{unit} per rank at the peak of a step. params, grads, optim: of parameters, gradients and optimizer. "
            "acts: activations, buffers, batch. comm: unsharded units and buckets. "
            + ("offl: in host memory or on NVMe. " if "offl" in columns else "")
            + "wire: sent per optimizer step."
            + (" batch: the largest per rank that fits." if self.max_batches else "")
        )
        return Group(
            Text(self._heading()),
            make_table(columns, rows, is_narrow=True),
            Text(legend, style="dim"),
            *(Text(f"Note: {note}") for note in self.notes),
            Text(self.advice, style="bold"),
        )

    def _label(self, each: Estimate) -> str:
        return each.layout.name.replace(each.layout.strategy + " ", "  ")

    def _heading(self) -> str:
        states = self.states
        trained = "" if states.num_trained == states.num_params else f" ({states.num_trained:,} trained)"
        dtypes = sorted({str(state.dtype).removeprefix("torch.") for state in states.parameters})
        parts = [f"{self.module_name}: {states.num_params:,} parameters{trained}", *dtypes]
        parts.append("1 rank" if self.world_size == 1 else f"{self.world_size} ranks")
        parts.append(self.settings.precision)
        if self.batch_size is not None:
            parts.append(f"batch of {self.batch_size} per rank")
        if self.settings.accumulate > 1:
            parts.append(f"{self.settings.accumulate} accumulated")
        return ", ".join(parts)


def plan(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any = None,
    world_size: int = 1,
    device_memory: int | str | None = None,
    *,
    precision: str = "32-true",
    accumulate: int = 1,
    clip_value: float | None = None,
    strategies: Iterable[str | HasLayout | Layout] | None = None,
    device_type: DeviceType | None = None,
    datamodule: LightningDataModule | None = None,
    max_batch: bool = False,
) -> Plan:
    """Predict memory and traffic of a fit for every strategy, and recommend one.

    The module is neither changed nor run: a fork of this process follows one step on tensors without memory. If this
    fails, for example because the step depends on values of tensors, the plan has no activations, and says so.

    Args:
        module: the module, which may be on the meta device, or a function that returns it.
        batch: a batch of one rank, as the training loader yields it. `None`: plan from model states alone.
        world_size: the number of ranks.
        device_memory: memory of a device, in bytes or as text such as `"80GiB"`. `None`: that of this machine's GPU, if
            it has one; otherwise unknown, and nothing is recommended.
        precision: as `Trainer(precision=...)`.
        accumulate: as `Trainer(accumulate_grad_batches=...)`.
        clip_value: as `Trainer(gradient_clip_val=...)`.
        strategies: names of strategies, such as `["paral_ddp", "paral_fsdp"]`, or objects, such as
            `ParalFSDPStrategy(replicate=2)`, whose options then count. `None`: all names.
        device_type: `"cuda"` or `"cpu"`. Offloading to host memory saves nothing on CPU. `None`: `"cuda"`.
        datamodule: what the module may find at `self.trainer.datamodule`.
        max_batch: also find the largest batch per rank that fits; needs `batch` and `device_memory`.

    Raises:
        ConfigurationError: an argument is wrong, the module cannot be built, or it does not take the batch.
    """
    settings = StepSettings(precision=precision, accumulate=accumulate, clip_value=clip_value)
    if world_size < 1:
        raise ConfigurationError(f"world_size={world_size} has to be at least 1, a number of ranks.")
    if device_memory is not None:
        device_memory = parse_bytes(device_memory, "device_memory")
    elif torch.cuda.is_available() and device_type != "cpu":
        device_memory = torch.cuda.get_device_properties(0).total_memory
    layouts = layouts_of(strategies)
    return make_plan(
        follow_steps(module, batch, settings, datamodule, on_cpu=device_type == "cpu", max_batch=max_batch),
        name=type(module).__name__ if isinstance(module, LightningModule) else "the module",
        layouts=layouts,
        world_size=world_size,
        device_memory=device_memory,
        settings=settings,
        on_cpu=device_type == "cpu",
    )


def make_plan(
    followed: FollowedSteps,
    *,
    name: str,
    layouts: Sequence[Layout],
    world_size: int,
    device_memory: int | None,
    settings: StepSettings,
    on_cpu: bool,
) -> Plan:
    """Return the plan for a module whose step was followed; the arguments are those of `plan`."""
    recomputes, num_units = followed.recomputed is not None, len(followed.plain.units) - 1
    rows: list[Layout] = []
    for layout in layouts:
        objection = layout.objection(world_size, num_units)
        if objection is None:
            rows += with_recomputation(layout, recomputes=recomputes)
        elif layout.label or len(layouts) < len(LAYOUTS):  # it was asked for
            raise ConfigurationError(f"{layout.strategy} cannot be planned: {objection}.")

    def of(row: Layout, batch_size: int | None = None) -> Estimate | None:
        """Return the costs with a batch of another size; `None` if they are unknown."""
        step = followed.step(row, batch_size)
        return None if step is None else estimate(row, step, followed.states, world_size, settings, on_cpu=on_cpu)

    estimates = tuple(each for row in rows if (each := of(row)) is not None)
    max_batches: dict[str, int] = {}
    if device_memory is not None and followed.doubled is not None:
        for row in rows:
            if of(row, 1) is not None:
                max_batches[row.name] = _largest(lambda size, row=row: fits(of(row, size), device_memory))  # type: ignore[misc, arg-type]
    considered = set(candidates(on_cpu=on_cpu, several_optimizers=followed.states.num_optimizers > 1))
    rated = [each for each in estimates if each.layout in considered] or list(estimates)
    chosen, advice = advise(rated, device_memory, max_batches)
    notes = [
        f"The row {layout.name} is {layout.strategy}{' with ' if layout.options else ''}{', '.join(layout.options)}. "
        "Its other options are not counted."
        for layout in layouts
        if layout.label
    ]
    notes += followed.plain.notes
    return Plan(
        module_name=name,
        states=followed.states,
        estimates=estimates,
        chosen=chosen,
        advice=advice,
        world_size=world_size,
        device_memory=device_memory,
        device_type="cpu" if on_cpu else "cuda",
        settings=settings,
        batch_size=followed.batch_size,
        notes=tuple(notes),
        max_batches=max_batches,
    )


def plan_fit(trainer: Trainer, module: LightningModule) -> Estimate:
    """Predict the costs of a fit under the strategy of the Trainer, as `follow_fit` does.

    Raises:
        ConfigurationError: the strategy or the module cannot be planned.
    """
    strategy: Any = trainer.strategy
    layout: Layout | None = getattr(strategy, "layout", None)
    if layout is None:
        raise ConfigurationError(f"{type(strategy).__name__} is not a strategy that can be planned")
    followed = follow_fit(trainer, module)
    num_ranks = trainer.num_devices if layout.engine == "dp" else trainer.world_size
    on_cpu = strategy.root_device.type == "cpu"
    return estimate(layout, followed.plain, followed.states, num_ranks, settings_of(trainer), on_cpu=on_cpu)


def with_recomputation(layout: Layout, *, recomputes: bool) -> tuple[Layout, ...]:
    """Return the rows of a plan for a layout: also one with recomputation, if the module has blocks for it.

    The row of a strategy object stands for its own options alone.
    """
    both = recomputes and not layout.label and layout.engine != "dp"
    return (layout, replace(layout, recomputes=True)) if both else (layout,)


def candidates(*, on_cpu: bool, several_optimizers: bool = False) -> tuple[Layout, ...]:
    """Return the layouts among which a recommendation is made, each with and without recomputation.

    DP and the ring cost as much memory as DDP, so they are left out.

    Args:
        on_cpu: whether the device is the CPU: offloading to host memory saves nothing there.
        several_optimizers: whether the module has several, which cannot be on NVMe nor under a pipeline.
    """
    chosen: list[Layout] = []
    for layout in LAYOUTS:
        if layout.strategy in ("paral_dp", "paral_ddp_ring"):
            continue
        if several_optimizers and (layout.optimizer_place == "nvme" or layout.engine == "pipeline"):
            continue
        if on_cpu and "host" in (layout.optimizer_place, layout.parameter_place):
            continue
        chosen += with_recomputation(layout, recomputes=True)
    return tuple(chosen)


def fits(each: Estimate, device_memory: int) -> bool:
    """Return whether the rank's peak leaves the margin of the device's memory, a number of bytes."""
    return each.peak_bytes <= (1 - MARGIN) * device_memory


def advise(
    estimates: Sequence[Estimate], device_memory: int | None, max_batches: dict[str, int] | None = None
) -> tuple[Estimate | None, str]:
    """Return the cheapest of the estimates that fits, and a sentence for the user.

    What makes a layout expensive, most important first: the layers themselves are divided, offloading, recomputation,
    bytes on the wire.

    Args:
        estimates: of the candidates.
        device_memory: bytes of a device; `None` if unknown.
        max_batches: the largest batch per rank that fits, by the name of the layout, if it is known.
    """

    def cost(each: Estimate) -> tuple[Any, ...]:
        layout = each.layout
        divides = layout.engine == "pipeline" or layout.tensor != 1
        distance = max(_DISTANCE[layout.optimizer_place], _DISTANCE[layout.parameter_place])
        order = [known.strategy for known in LAYOUTS].index(layout.strategy)
        return divides, distance, layout.recomputes, each.wire_bytes, order

    least = min(estimates, key=lambda each: each.peak_bytes)
    needs = f"{least.layout.name} needs the least, {format_bytes(least.peak_bytes)}."
    if device_memory is None:
        return None, f"Give the memory of a device, for example --device-memory 80GiB, for a recommendation. {needs}"
    limit = f"{format_bytes((1 - MARGIN) * device_memory)} ({format_bytes(device_memory)} less {MARGIN:.0%})"
    dismissed: list[str] = []
    for each in sorted(estimates, key=cost):
        if fits(each, device_memory):
            text = f"Use {describe(each.layout)}: it needs {format_bytes(each.peak_bytes)} of {limit}."
            return each, text + (f" Cheaper, but too large: {', '.join(dismissed)}." if dismissed else "")
        dismissed.append(f"{each.layout.name} ({format_bytes(each.peak_bytes)})")
    sizes = {name: size for name, size in (max_batches or {}).items() if size > 0}
    if sizes:
        name = max(sizes, key=lambda name: sizes[name])
        samples = "1 sample" if sizes[name] == 1 else f"{sizes[name]} samples"
        help_ = f"With at most {samples} per rank and batch, {name} fits; accumulate_grad_batches restores the size."
    else:
        help_ = "Use more ranks, smaller batches, 16-bit precision, or devices with more memory."
    return None, f"Nothing fits into {limit}. {needs} {help_}"


def describe(layout: Layout) -> str:
    """Return how to select a layout in Python."""
    if layout.label:
        return f"the {layout.label} strategy"
    recomputing = " with activation_checkpointing=ActivationCheckpointing()" if layout.recomputes else ""
    return f'strategy="{layout.strategy}"{recomputing}'


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number up to 2^20 for which `holds` is true, as it is for all smaller ones; 0 if none is."""
    low, high = 0, 1
    while high <= 2**20 and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
