"""Show a plan: as a table, as JSON values, and as a plot."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.planning.advice import MARGIN, fits
from lightning_paral.planning.estimate import Estimate
from lightning_paral.planning.memory.ledger import Item
from lightning_paral.planning.plan import Plan
from lightning_paral.planning.time.world_sizes import rate
from lightning_paral.plots import import_pyplot, save_figure
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_console, make_table

_HEADERS = {
    Item.PARAMETERS: "params",
    Item.GRADIENTS: "grads",
    Item.OPTIMIZER: "optim",
    Item.ACTIVATIONS: "acts",
    Item.COMMUNICATION: "comm",
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def plan_as_table(plan: Plan) -> RenderableType:
    """Return the plan for a rich console: what is planned, a row per strategy, notes, and the recommendation."""
    most = max(each.memory.peak_bytes for each in plan.estimates)
    unit, divisor = next((pair for pair in _UNITS if most >= pair[1]), _UNITS[-1])

    def size(num_bytes: float) -> str:
        value = num_bytes / divisor
        return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

    has_offloaded = any(_offloaded(each) for each in plan.estimates)
    headers = ["strategy", *(["fits"] if plan.device_memory else []), "peak", *_HEADERS.values()]
    headers += [*(["offl"] if has_offloaded else []), "wire"]
    headers += ["step"] if plan.machine else []
    headers += ["batch"] if plan.max_batches else []
    rows = []
    for each in plan.estimates:
        memory = each.memory
        is_chosen = plan.chosen is not None and each.layout == plan.chosen.layout
        name = each.layout.name.replace(each.layout.strategy + " ", "  ")
        row = [f"[bold]{name}[/]" if is_chosen else name]
        if plan.device_memory:
            row.append("[green]yes[/]" if fits(each, plan.device_memory) else "[red]no[/]")
        row += [size(memory.peak_bytes), *(size(memory.by_item[item]) for item in _HEADERS)]
        row += [size(_offloaded(each))] if has_offloaded else []
        row.append(size(each.wire_bytes))
        row += ["" if each.seconds is None else format_seconds(each.seconds)] if plan.machine else []
        row += [f"{plan.max_batches[each.layout.name]:,}" if each.layout.name in plan.max_batches else ""] * bool(
            plan.max_batches
        )
        rows.append(row)
    table = make_table(headers, rows, is_narrow=True)
    legend = (
        f"{unit} per rank at the peak of a step. params, grads, optim: of parameters, gradients and optimizer. "
        "acts: activations, buffers, batch. comm: unsharded units and buckets. "
        + ("offl: in host memory or on NVMe. " if has_offloaded else "")
        + "wire: sent per optimizer step."
    )
    if plan.machine:
        legend += " step: predicted time; empty if copies between devices, host memory or NVMe decide."
    if plan.max_batches:
        legend += " batch: the largest per rank that fits."
    parts: list[RenderableType] = [Text(_heading(plan)), table, Text(legend, style="dim")]
    parts += [Text(f"Note: {note}") for note in plan.notes]
    return Group(*parts, Text(plan.advice.text, style="bold"))


def _offloaded(each: Estimate) -> int:
    return each.memory.host_bytes + each.memory.nvme_bytes


def plan_as_text(plan: Plan) -> str:
    """Return the table as plain text."""
    console = make_console()
    with console.capture() as capture:
        console.print(plan_as_table(plan))
    return capture.get().rstrip("\n")


def print_plan(plan: Plan) -> None:
    """Print the table, with colour where the terminal has it."""
    make_console().print(plan_as_table(plan))


def _heading(plan: Plan) -> str:
    states = plan.states
    dtypes = ", ".join(sorted(states.numel_by_dtype()))
    trained = "" if states.num_trained == states.num_params else f" ({states.num_trained:,} trained)"
    parts = [f"{plan.module_name}: {states.num_params:,} parameters{trained}, {dtypes}"]
    parts.append("1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks")
    parts.append(plan.settings.precision)
    if plan.batch_size is not None:
        parts.append(f"batch of {plan.batch_size} per rank")
    if plan.settings.accumulate > 1:
        parts.append(f"{plan.settings.accumulate} accumulated")
    if plan.machine is not None:
        parts.append(f"{plan.machine.link * 8 / 1e9:g} Gbit/s, {plan.machine.flops / 1e12:g} TFLOP/s per rank")
    return ", ".join(parts)


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    states = plan.states
    return {
        "module": plan.module_name,
        "world_size": plan.world_size,
        "device_type": plan.device_type,
        "device_memory": plan.device_memory,
        "margin": MARGIN,
        "precision": plan.settings.precision,
        "accumulate": plan.settings.accumulate,
        "batch_size": plan.batch_size,
        "states": {
            "parameters": states.num_params,
            "trained": states.num_trained,
            "by_dtype": states.numel_by_dtype(),
            "parameter_bytes": states.parameter_bytes,
            "gradient_bytes": states.gradient_bytes,
            "optimizer_bytes": states.optimizer_bytes,
            "buffer_bytes": states.buffer_bytes,
        },
        "machine": None if plan.machine is None else asdict(plan.machine),
        "tokens_per_sample": plan.tokens_per_sample,
        "strategies": [_estimate_as_dict(each, plan) for each in plan.estimates],
        "recommended": None if plan.chosen is None else plan.chosen.layout.name,
        "advice": plan.advice.text,
        "notes": list(plan.notes),
    }


def _estimate_as_dict(each: Estimate, plan: Plan) -> dict[str, Any]:
    return {
        "name": each.layout.name,
        "strategy": each.layout.strategy,
        "is_configured": bool(each.layout.label),
        "options": list(each.layout.options),
        "not_counted": list(each.layout.uncounted),
        "recomputes": each.layout.recomputes,
        "fits": None if plan.device_memory is None else fits(each, plan.device_memory),
        "peak_bytes": each.memory.peak_bytes,
        "bytes": {item.value: num_bytes for item, num_bytes in each.memory.by_item.items()},
        "host_bytes": each.memory.host_bytes,
        "nvme_bytes": each.memory.nvme_bytes,
        "wire_bytes": each.wire_bytes,
        "seconds": each.seconds,
        "samples_per_second": rate(plan.batch_size, plan.settings, plan.world_size, each.seconds),
        "max_batch": plan.max_batches.get(each.layout.name),
    }


def draw_plan(plan: Plan, path: str) -> None:
    """Draw stacked bars of the memory of each strategy, with a line at the memory of the device.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = import_pyplot()
    names = [each.layout.name for each in plan.estimates]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(names) + 1.6), layout="constrained")
    left = [0.0] * len(names)
    for item in Item:
        widths = [each.memory.by_item[item] / 2**30 for each in plan.estimates]
        axes.barh(names, widths, left=left, label=item.value)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if plan.device_memory:
        axes.axvline(plan.device_memory / 2**30, color="black", linestyle="--")
        label = f" {format_bytes(plan.device_memory)}"
        axes.text(plan.device_memory / 2**30, len(names) - 0.5, label, va="bottom", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per rank at the peak of a step")
    axes.set_title(_heading(plan), fontsize="medium", loc="left", pad=14)
    axes.margins(y=0.02)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
    pyplot.close(figure)
