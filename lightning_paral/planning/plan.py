"""Predict the costs of every strategy for a module, and recommend one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.costs import Case, Estimate, estimate
from lightning_paral.planning.fake import StepSettings
from lightning_paral.planning.follow import FollowedSteps, follow_fit, follow_steps
from lightning_paral.planning.layout import LAYOUTS, Layout, layouts_of
from lightning_paral.text import format_bytes, make_console, make_table, parse_bytes

DeviceType = Literal["cpu", "cuda"]
MARGIN = 0.1
"""The fraction of the device's memory that stays free, for what is not planned: libraries, and fragmentation."""
_NOT_RECOMMENDED = ("paral_ddp_ring", "paral_local_sgd", "paral_diloco")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_LEGEND = (
    "per rank at the peak of a step. acts: activations, buffers, batch. comm: unsharded units and buckets. offl: in "
    "host memory or on NVMe. wire: sent per step of the optimizer."
)


class Plan:
    """The costs of each strategy, and a recommendation. `print(plan)` shows a table.

    A layout without a label has a second row, with recomputation, if the module has blocks for it. Layouts that the
    number of ranks or the module excludes are left out, which `notes` says.

    Args:
        followed: the states of the module, and its step.
        layouts: what to plan for.
        world_size: the number of ranks.
        device_memory: bytes; `None` if unknown.

    Raises:
        ConfigurationError: no layout is left.
    """

    def __init__(
        self, followed: FollowedSteps, layouts: Sequence[Layout], world_size: int, device_memory: int | None
    ) -> None:
        self._followed, self.states, self.world_size = followed, followed.states, world_size
        self.device_memory, self.batch_size, self.settings = device_memory, followed.batch_size, followed.settings
        rows, notes, left_out = list[Layout](), list[str](), list[str]()
        for layout in layouts:
            if objection := layout.objection(world_size, len(followed.plain.units) - 1):
                left_out.append(f"{layout.strategy} cannot be planned: {objection}.")
                continue
            rows.append(layout)
            if layout.label:
                notes.append(f"The row {layout.label} is {layout.strategy} with the options that change the figures.")
            elif followed.recomputed is not None:
                rows.append(replace(layout, recomputes=True))
        if not rows:
            raise ConfigurationError(" ".join(left_out) or "No strategies were given to plan for.")
        self.notes = (*notes, *left_out, *followed.plain.notes)
        """What was assumed, and what is not in the figures."""
        case = partial(Case, states=self.states, num_ranks=world_size, settings=self.settings, on_cpu=followed.on_cpu)
        steps = {False: followed.plain, True: followed.recomputed or followed.plain}
        self.estimates = tuple(estimate(case(layout=row, step=steps[row.recomputes])) for row in rows)
        """In the order of the table."""
        several = self.states.num_optimizers > 1
        rated = [each for each in self.estimates if is_candidate(each.layout, followed.on_cpu, several)]
        self.chosen, self.advice = advise(rated or self.estimates, device_memory)
        """The recommended layout and its costs, `None` if nothing fits or if the memory is unknown; and a sentence."""

    def of(self, name: str) -> Estimate:
        """Return the estimate of a strategy, such as `paral_fsdp` or `paral_fsdp + recompute`.

        Raises:
            ConfigurationError: it was not planned.
        """
        rows = {each.layout.name: each for each in self.estimates}
        if name not in rows:
            raise ConfigurationError(f"The plan has no row {name!r}. It has: {', '.join(rows)}.")
        return rows[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; sizes are in bytes."""
        return {
            "module": self._followed.module_name,
            "world_size": self.world_size,
            "device_type": "cpu" if self._followed.on_cpu else "cuda",
            "device_memory": self.device_memory,
            "margin": MARGIN,
            **asdict(self.settings),
            "batch_size": self.batch_size,
            "states": {name: value for name, value in vars(self.states).items() if isinstance(value, int)},
            "strategies": [self._row(each) for each in self.estimates],
            "recommended": None if self.chosen is None else self.chosen.layout.name,
            "advice": self.advice,
            "notes": list(self.notes),
        }

    def _row(self, each: Estimate) -> dict[str, Any]:
        return {
            "name": each.layout.name,
            **asdict(each.layout),
            "fits": None if self.device_memory is None else fits(each, self.device_memory),
            "peak_bytes": each.peak_bytes,
            "bytes": each.memory._asdict(),
            "host_bytes": each.host_bytes,
            "nvme_bytes": each.nvme_bytes,
            "wire_bytes": each.wire_bytes,
        }

    def __str__(self) -> str:
        console = make_console()
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def __rich__(self) -> RenderableType:
        most = max(each.peak_bytes for each in self.estimates)
        unit = next((unit for unit, divisor in _UNITS.items() if most >= divisor), "KiB")
        fitting = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}

        def size(num_bytes: float) -> str:
            value = num_bytes / _UNITS[unit]
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

        def cells(each: Estimate) -> list[str]:
            label = each.layout.name.replace(each.layout.strategy + " ", "  ")
            sizes = (each.peak_bytes, *each.memory, each.host_bytes + each.nvme_bytes, each.wire_bytes)
            label = f"[bold]{label}[/]" if each is self.chosen else label
            return [label, fitting[self._row(each)["fits"]], *map(size, sizes)]

        headers = ("strategy", "fits", "peak", "params", "grads", "optim", "acts", "comm", "offl", "wire")
        states, dtypes = self.states, {str(state.dtype).removeprefix("torch.") for state in self.states.parameters}
        return Group(
            Text(
                f"{self._followed.module_name}: {states.num_params:,} parameters ({states.num_trained:,} trained), "
                f"{', '.join(sorted(dtypes))}, {self.world_size} ranks, {self.settings.precision}, "
                f"batch of {self.batch_size or '?'} per rank, {self.settings.accumulate} accumulated"
            ),
            make_table(headers, map(cells, self.estimates), is_narrow=True),
            Text(f"{unit} {_LEGEND}", style="dim"),
            *(Text(f"Note: {note}") for note in self.notes),
            Text(self.advice, style="bold"),
        )


def plan(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any = None,
    world_size: int = 1,
    device_memory: int | str | None = None,
    *,
    precision: str = "32-true",
    accumulate: int = 1,
    strategies: Iterable[Any] | None = None,
    device_type: DeviceType | None = None,
    datamodule: LightningDataModule | None = None,
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
        strategies: names of strategies, such as `["paral_ddp", "paral_fsdp"]`, or objects, such as
            `ParalFSDPStrategy(replicate=2)`, whose options then count. `None`: all names.
        device_type: `"cuda"` or `"cpu"`. Offloading to host memory saves nothing on CPU. `None`: `"cuda"`.
        datamodule: what the module may find at `self.trainer.datamodule`.

    Raises:
        ConfigurationError: an argument is wrong, or the module cannot be built.
    """
    settings = StepSettings(precision=precision, accumulate=accumulate)
    if world_size < 1:
        raise ConfigurationError(f"world_size={world_size} has to be at least 1, a number of ranks.")
    if device_memory is not None:
        device_memory = parse_bytes(device_memory, "device_memory")
    elif torch.cuda.is_available() and device_type != "cpu":
        device_memory = torch.cuda.get_device_properties(0).total_memory
    layouts = layouts_of(strategies)
    followed = follow_steps(module, batch, settings, datamodule, on_cpu=device_type == "cpu")
    return Plan(followed, layouts, world_size, device_memory)


def plan_fit(trainer: Trainer, module: LightningModule, layouts: Sequence[Layout], device_memory: int) -> Plan:
    """Plan a fit in which the hooks `setup` have run, as `follow_fit` says.

    Args:
        trainer: the Trainer.
        module: its module, which has not been wrapped.
        layouts: what to plan for.
        device_memory: bytes.

    Raises:
        ConfigurationError: the module cannot be planned.
    """
    return Plan(follow_fit(trainer, module), layouts, trainer.world_size, device_memory)


def is_candidate(layout: Layout, on_cpu: bool, several_optimizers: bool = False) -> bool:
    """Return whether a layout may be recommended.

    The ring costs as much memory as DDP. Local SGD learns something else. On CPU, offloading to host memory saves
    nothing. Several optimizers cannot be on NVMe nor under a pipeline.
    """
    if layout.strategy in _NOT_RECOMMENDED or (on_cpu and layout.distance == 1):
        return False
    return not several_optimizers or (layout.distance < 2 and layout.engine != "pipeline")


def fits(each: Estimate, device_memory: int) -> bool:
    """Return whether the rank's peak leaves the margin of the device's memory, a number of bytes."""
    return each.peak_bytes <= (1 - MARGIN) * device_memory


def advise(estimates: Sequence[Estimate], device_memory: int | None) -> tuple[Estimate | None, str]:
    """Return the cheapest of the estimates that fits, and a sentence for the user.

    What makes a layout expensive, most important first: the layers themselves are divided, offloading, recomputation,
    bytes on the wire.

    Args:
        estimates: of the candidates.
        device_memory: bytes of a device; `None` if unknown.
    """

    def cost(each: Estimate) -> tuple[Any, ...]:
        layout = each.layout
        divides = layout.engine == "pipeline" or layout.tensor != 1
        order = [known.strategy for known in LAYOUTS].index(layout.strategy)
        return divides, layout.distance, layout.recomputes, each.wire_bytes, order

    least = min(estimates, key=lambda each: each.peak_bytes)
    needs = f"{least.layout.name} needs the least, {format_bytes(least.peak_bytes)}."
    if device_memory is None:
        return None, f"Give the memory of a device, for example --device-memory 80GiB, for a recommendation. {needs}"
    limit = f"{format_bytes((1 - MARGIN) * device_memory)} ({format_bytes(device_memory)} less {MARGIN:.0%})"
    dismissed: list[str] = []
    for each in sorted(estimates, key=cost):
        if fits(each, device_memory):
            recomputing = " with activation_checkpointing=ActivationCheckpointing()" if each.layout.recomputes else ""
            named = f'strategy="{each.layout.strategy}"{recomputing}'
            named = f"the {each.layout.label} strategy" if each.layout.label else named
            text = f"Use {named}: it needs {format_bytes(each.peak_bytes)} of {limit}."
            return each, text + (f" Cheaper, but too large: {', '.join(dismissed)}." if dismissed else "")
        dismissed.append(f"{each.layout.name} ({format_bytes(each.peak_bytes)})")
    help_ = "Use more ranks, smaller batches, 16-bit precision, or devices with more memory."
    return None, f"Nothing fits into {limit}. {needs} {help_}"
