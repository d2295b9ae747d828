"""Predict the costs of every strategy for a module, and recommend one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.advice import Advice, advise, candidates, usable
from lightning_paral.planning.estimate import Estimate, estimate, rank_memory
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import HasLayout, Layout, check_replicas, layouts_of, notes_on_objects, rows_of
from lightning_paral.planning.scaling import ScaledSteps, largest_size
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.options import MachineOptions
from lightning_paral.planning.time.world_sizes import WORLD_SIZES, ScalingRow, scaling_rows
from lightning_paral.quantities import parse_bytes

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of each strategy, and a recommendation. `print(plan)` shows a table."""

    module_name: str
    states: ModelStates
    estimates: tuple[Estimate, ...]
    """In the order of the table."""
    advice: Advice
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
    machine: Machine | None = None
    """How fast ranks compute and communicate; `None` if it was not given, and times are unknown."""
    tokens_per_sample: int | None = None
    followed: FollowedSteps | None = field(default=None, repr=False, compare=False)
    """The step from which the plan was made."""

    @property
    def chosen(self) -> Estimate | None:
        """The recommended layout and its costs; `None` if nothing fits, or if the memory is unknown."""
        return self.advice.chosen

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

    def scaling(self, world_sizes: Iterable[int] = WORLD_SIZES) -> tuple[ScalingRow, ...]:
        """Return the predicted time of every strategy at several numbers of ranks, and whether it fits.

        Each rank has the same batch at every number of ranks.

        Args:
            world_sizes: numbers of ranks; by default, the powers of two up to 4096.

        Raises:
            ConfigurationError: the plan has no times, or a number is not positive.
        """
        if self.machine is None or self.followed is None:
            raise ConfigurationError(
                "The plan has no times. Give link and flops, for example plan(..., link='400Gbit', flops='400T')."
            )
        sizes = tuple(world_sizes)
        for size in sizes:
            check_world_size(size)
        return scaling_rows(
            self.followed,
            [each.layout for each in self.estimates],
            sizes,
            self.settings,
            self.machine,
            on_cpu=self.device_type == "cpu",
            usable_memory=None if self.device_memory is None else usable(self.device_memory),
            tokens_per_sample=self.tokens_per_sample,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; sizes are in bytes."""
        from lightning_paral.planning.report import plan_as_dict

        return plan_as_dict(self)

    def draw(self, path: str) -> None:
        """Draw the memory of each strategy as stacked bars, with a line at the device's memory.

        Args:
            path: the file to write; its ending names the format, such as `.png`.

        Raises:
            ConfigurationError: matplotlib is not installed, or the file cannot be written.
        """
        from lightning_paral.planning.report import draw_plan

        draw_plan(self, path)

    def __str__(self) -> str:
        from lightning_paral.planning.report import plan_as_text

        return plan_as_text(self)


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
    link: str | float | None = None,
    flops: str | float | None = None,
    machine: Machine | MachineOptions | None = None,
    tokens_per_sample: int | None = None,
) -> Plan:
    """Predict memory and traffic of a fit for every strategy, and recommend one.

    With `link` and `flops`, the time of a step is predicted as well, and the fastest that fits is recommended.

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
        link: the bandwidth with which a rank sends to other nodes: bytes per second, or text such as `"400Gbit"`.
        flops: the floating-point operations per second that a rank achieves, or text such as `"400T"`. It is less than
            the peak of the datasheet.
        machine: more than `link` and `flops`, and instead of them.
        tokens_per_sample: the number of tokens of each sample, for tokens per second.

    Raises:
        ConfigurationError: an argument is wrong, the module cannot be built, or it does not take the batch.
    """
    settings = StepSettings(precision=precision, accumulate=accumulate, clip_value=clip_value)
    check_world_size(world_size)
    if machine is None:
        machine = MachineOptions(link=link, flops=flops)
    elif link is not None or flops is not None:
        raise ConfigurationError("plan(machine=...) has a link and FLOP/s. Leave out link and flops.")
    if tokens_per_sample is not None and tokens_per_sample < 1:
        raise ConfigurationError(f"tokens_per_sample={tokens_per_sample} has to be at least 1, a number of tokens.")
    if device_memory is not None:
        device_memory = parse_bytes(device_memory, "device_memory")
    elif torch.cuda.is_available() and device_type != "cpu":
        device_memory = torch.cuda.get_device_properties(0).total_memory
    layouts = layouts_of(strategies)
    num_devices = world_size if any(layout.engine == "dp" for layout in layouts) else 1
    followed = follow_steps(module, batch, settings, datamodule, max_batch=max_batch, num_devices=num_devices)
    name = type(module).__name__ if isinstance(module, LightningModule) else "the module"
    return make_plan(
        followed,
        name=name,
        layouts=layouts,
        world_size=world_size,
        device_memory=device_memory,
        settings=settings,
        on_cpu=device_type == "cpu",
        max_batch=max_batch,
        machine=machine.machine(followed, name) if isinstance(machine, MachineOptions) else machine,
        tokens_per_sample=tokens_per_sample,
    )


def check_world_size(world_size: int) -> None:
    """Raise a `ConfigurationError` if the number of ranks is not positive."""
    if world_size < 1:
        raise ConfigurationError(f"world_size={world_size} has to be at least 1, a number of ranks.")


def make_plan(
    followed: FollowedSteps,
    *,
    name: str,
    layouts: Sequence[Layout],
    world_size: int,
    device_memory: int | None,
    settings: StepSettings,
    on_cpu: bool,
    max_batch: bool = False,
    machine: Machine | None = None,
    tokens_per_sample: int | None = None,
) -> Plan:
    """Return the plan for a module whose step was followed; the arguments are those of `plan`."""
    recomputes = followed.recomputed is not None
    considered = candidates(on_cpu=on_cpu, several_optimizers=followed.states.num_optimizers > 1, recomputes=recomputes)
    check_replicas(layouts, world_size)
    rows = [row for layout in layouts for row in rows_of(layout, recomputes=recomputes)]
    estimates = tuple(
        estimate(row, followed.timeline(row), followed.states, world_size, settings, on_cpu=on_cpu, machine=machine)
        for row in rows
    )
    max_batches = (
        _max_batches(followed, rows, world_size, device_memory, settings, on_cpu=on_cpu)
        if max_batch and device_memory is not None
        else {}
    )
    chosen_from = [each for each in estimates if each.layout in considered]
    advised = {each.layout.name: max_batches.get(each.layout.name, 0) for each in chosen_from}
    return Plan(
        module_name=name,
        states=followed.states,
        estimates=estimates,
        advice=advise(chosen_from or estimates, device_memory, advised),
        world_size=world_size,
        device_memory=device_memory,
        device_type="cpu" if on_cpu else "cuda",
        settings=settings,
        batch_size=followed.batch_size,
        notes=(
            *notes_on_objects(layouts, recomputes=recomputes),
            *_notes(
                followed, max_batch=max_batch, has_memory=device_memory is not None, has_machine=machine is not None
            ),
        ),
        max_batches=max_batches,
        machine=machine,
        tokens_per_sample=tokens_per_sample,
        followed=followed,
    )


def _notes(followed: FollowedSteps, *, max_batch: bool, has_memory: bool, has_machine: bool) -> tuple[str, ...]:
    notes = list(followed.plain.notes)
    if has_machine and not followed.plain.flops:
        notes.append("Times are unknown, because the operations of a step are.")
    if max_batch and not has_memory:
        notes.append("The largest batch is unknown without the memory of a device.")
    elif max_batch and followed.scaled_plain is None:
        notes.append("The largest batch is unknown: the step differs between batch sizes, or no batch was given.")
    return tuple(notes)


def _max_batches(
    followed: FollowedSteps,
    rows: Sequence[Layout],
    world_size: int,
    device_memory: int,
    settings: StepSettings,
    *,
    on_cpu: bool,
) -> dict[str, int]:
    found = {}
    for row in rows:
        scaled = followed.scaled_recomputed if row.recomputes else followed.scaled_plain
        if scaled is None:
            continue

        def is_small_enough(size: int, row: Layout = row, scaled: ScaledSteps = scaled) -> bool:
            part = -(-size // world_size) if row.engine == "dp" else size  # DP divides the batch of the loader
            memory = rank_memory(row, scaled.at(part), followed.states, world_size, settings, on_cpu=on_cpu)
            return memory.peak_bytes <= usable(device_memory)

        found[row.name] = largest_size(is_small_enough)
    return found
