"""`paral plan`: predict memory, traffic and time of every strategy for a LightningCLI configuration."""

import argparse
import json
import sys
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lightning_paral.cli.train import ConfiguredCLI
from lightning_paral.engines.zero.runtime.deepspeed import check_installed
from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.batch import batch_of_shape, first_batch
from lightning_paral.planning.layout import LAYOUTS, Layout
from lightning_paral.planning.plan import Plan, plan
from lightning_paral.planning.report import print_plan
from lightning_paral.planning.scaling_report import scaling_as_table
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.tensor_plan.following import Batches, first_batches, observe
from lightning_paral.planning.tensor_plan.make import make_plan
from lightning_paral.planning.tensor_plan.report import TensorReport, print_report, report_as_dict, report_of
from lightning_paral.planning.time.options import MachineOptions
from lightning_paral.planning.time.world_sizes import WORLD_SIZES, parse_world_sizes
from lightning_paral.quantities import parse_bytes
from lightning_paral.strategies.auto import ParalAutoStrategy
from lightning_paral.strategies.zero import ParalZeROStrategy
from lightning_paral.tables import make_console

_NOT_PLANNED = ("logger", "callbacks", "plugins", "profiler")
"""Options of the Trainer whose objects are not created: they would open files or start other programs."""


def plan_command(arguments: list[str]) -> None:
    """Predict the memory and the traffic of a fit for every strategy, and recommend the cheapest that fits.

    With --link and --flops, it also predicts the time of a step, and recommends the fastest that fits.
    With --tensor-parallel, it prints instead which layers tensor parallelism splits, and how.

    All options that are not listed here are those of `paral fit`, such as --config, --model, --data and
    --trainer.precision. Nothing is trained, and no memory is allocated for the model.
    """
    parser = argparse.ArgumentParser(
        prog="paral plan", description=plan_command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world-size", type=int, help="number of ranks; without it, trainer.devices times trainer.num_nodes"
    )
    parser.add_argument(
        "--device-memory", help="memory of a device, such as 80GiB; without it, that of this machine's GPU, if any"
    )
    parser.add_argument("--batch-shape", help="instead of the data: shapes and dtypes, such as 8x128:int64,8x128:int64")
    parser.add_argument("--strategies", help="names with commas between them; without it, all strategies")
    parser.add_argument("--max-batch", action="store_true", help="also find the largest batch per rank that fits")
    parser.add_argument(
        "--tensor-parallel", type=int, metavar="T", help="instead of costs: how each layer is split over T tensor ranks"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device; cuda if left out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of each strategy; needs matplotlib")
    _add_time_options(parser)
    options, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("give a configuration, for example --config configs/gpt.yaml")
    if options.device_memory is not None:
        options.device_memory = parse_bytes(options.device_memory, "--device-memory")
    if options.batch_shape is not None:
        batch_of_shape(options.batch_shape)
    if options.tensor_parallel is not None:
        report = _tensor_report(options, rest)
        if options.json:
            print(json.dumps(report_as_dict(report), indent=2))
        else:
            print_report(report)
        return
    machine = _machine_options(options)
    world_sizes = None if options.scale is None else parse_world_sizes(options.scale)
    if world_sizes and machine == MachineOptions(are_cli_options=True):
        raise ConfigurationError(
            "--scale needs times. Add --link and --flops, for example --link 400Gbit --flops 400T."
        )
    made = _plan(options, rest, machine)
    scaling = made.scaling(world_sizes) if world_sizes else ()
    if options.plot:
        made.draw(options.plot)
    if options.json:
        print(json.dumps(made.as_dict() | {"scaling": [row.as_dict() for row in scaling]}, indent=2))
        return
    print_plan(made)
    if scaling:
        shown = [row for row in scaling if not row.layout.recomputes or _is_chosen(row.layout, made)]
        make_console().print(scaling_as_table(shown))


def _is_chosen(layout: Layout, made: Plan) -> bool:
    return made.chosen is not None and made.chosen.layout == layout


def _add_time_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time of a step")
    group.add_argument("--link", help="bandwidth with which a rank sends to other nodes, such as 400Gbit or 50GB/s")
    group.add_argument("--flops", help="operations per second that a rank achieves, such as 400T: not the peak")
    group.add_argument("--latency", help="of a step of a collective, such as 20us (default: 14us)")
    group.add_argument("--local-link", help="bandwidth with which a rank sends within its node, such as 450GB/s")
    group.add_argument("--ranks-per-node", type=int, help="number of ranks that --local-link joins")
    group.add_argument(
        "--optimizer-bandwidth", help="bytes per second that the optimizer updates, such as 2TB/s (default: no time)"
    )
    group.add_argument(
        "--copy-bandwidth", help="on CPU, bytes per second copied to buffers, such as 3GB/s (default: no time)"
    )
    group.add_argument(
        "--measured",
        nargs="+",
        default=[],
        metavar="FILE",
        help="instead of the above: what `paral bench comm`, `step` and `adam` have printed with --json",
    )
    group.add_argument("--tokens-per-sample", type=int, help="for tokens per second")
    group.add_argument(
        "--scale",
        nargs="?",
        const=",".join(map(str, WORLD_SIZES)),
        metavar="N,N,...",
        help="also predict times for these numbers of ranks (default: 1 to 4096)",
    )


def _machine_options(options: argparse.Namespace) -> MachineOptions:
    return MachineOptions(
        link=options.link,
        flops=options.flops,
        latency=options.latency,
        local_link=options.local_link,
        ranks_per_node=options.ranks_per_node,
        optimizer_bandwidth=options.optimizer_bandwidth,
        copy_bandwidth=options.copy_bandwidth,
        measured=tuple(options.measured),
        are_cli_options=True,
    )


def _configured(rest: list[str]) -> "_PlanningCLI":
    return _PlanningCLI(rest)


def _batch(options: argparse.Namespace, cli: "_PlanningCLI") -> Any:
    if options.batch_shape is not None:
        return batch_of_shape(options.batch_shape)
    return first_batch(cli.model, cli.datamodule)


def _tensor_report(options: argparse.Namespace, rest: list[str]) -> TensorReport:
    """Return how the configured plan, or the automatic one, splits the layers over the tensor ranks."""
    cli = _configured(rest)
    given = cli.trainer_options
    settings = StepSettings(precision=str(given.get("precision") or "32-true"))
    batch = _batch(options, cli)
    evaluations: Batches = {}
    source = cli.datamodule if cli.datamodule is not None else cli.model
    if (
        options.batch_shape is None
        and given.get("limit_val_batches") not in (0, 0.0)
        and is_overridden("validation_step", cli.model)
        and is_overridden("val_dataloader", source)
    ):
        evaluations = {"validation_step": lambda: first_batches(source.val_dataloader())}
    num_ranks = options.tensor_parallel
    observations = observe(cli.model, batch, settings, cli.datamodule, num_ranks=num_ranks, evaluations=evaluations)
    configured = getattr(getattr(cli.strategy, "_options", None), "plan", "auto")
    made = make_plan(cli.model, num_ranks, observations, configured)
    return report_of(cli.model, num_ranks, made, observations)


def _plan(options: argparse.Namespace, rest: list[str], machine: MachineOptions) -> Plan:
    cli = _configured(rest)
    given = cli.trainer_options
    world_size = options.world_size if options.world_size is not None else _configured_world_size(given)
    batch = _batch(options, cli)
    return plan(
        cli.model,
        batch,
        world_size,
        options.device_memory,
        precision=str(given.get("precision") or "32-true"),
        accumulate=int(given.get("accumulate_grad_batches") or 1),
        clip_value=given.get("gradient_clip_val"),
        strategies=_rows(cli.strategy, options.strategies),
        device_type=options.device,
        datamodule=cli.datamodule,
        max_batch=options.max_batch,
        machine=machine,
        tokens_per_sample=options.tokens_per_sample,
    )


def _rows(configured: Any, names: str | None) -> list[Any]:
    """Return what to plan for: the configured strategy first, if it can be planned, and then the names.

    Args:
        configured: the strategy of the configuration, an object or a name; `None` if there is none.
        names: names with commas between them; `None` for all.
    """
    rows: list[Any] = []
    known = {layout.strategy: layout for layout in LAYOUTS}
    layout = known.get(configured) if isinstance(configured, str) else getattr(configured, "layout", None)
    if layout is not None:
        rows.append(layout)
    elif configured not in (None, "auto", "paral_auto") and not isinstance(configured, ParalAutoStrategy):
        name = configured if isinstance(configured, str) else type(configured).__name__
        print(f"paral plan: the configured strategy, {name}, has no row: it cannot be planned.", file=sys.stderr)
    return rows + (list(known) if names is None else [name.strip() for name in names.split(",")])


def _configured_world_size(given: dict[str, Any]) -> int:
    """Return the number of ranks in the configuration.

    Raises:
        ConfigurationError: it is not a number there.
    """
    devices, num_nodes = given.get("devices"), given.get("num_nodes") or 1
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if isinstance(devices, list):
        devices = len(devices)
    if not isinstance(devices, int) or devices < 1:
        raise ConfigurationError(
            f"The configuration has devices={devices!r}, which is not a number. Give the number of ranks, for example "
            "--world-size 8."
        )
    return devices * num_nodes


class _PlanningCLI(ConfiguredCLI):
    """Creates the model without memory, the data and the strategy, but no Trainer."""

    def before_instantiate_classes(self) -> None:
        """Remove options of the Trainer whose objects are not needed, and create modules without memory."""
        self.config[self.subcommand].trainer.update(Namespace(dict.fromkeys(_NOT_PLANNED)))  # type: ignore[no-untyped-call]
        self.parser.add_instantiator(_make_on_meta, Module, subclasses=True, prepend=True)
        self.parser.add_instantiator(_make_if_installed, ParalZeROStrategy, subclasses=True, prepend=True)

    @property
    def strategy(self) -> Any:
        """The strategy of the configuration: an object, a name, or `None`."""
        return self.trainer_options["strategy"]


def _make_on_meta(cls: type[Module], *args: Any, **kwargs: Any) -> Module:
    try:
        with torch.device("meta"):
            return cls(*args, **kwargs)
    except Exception:  # it needs values of its tensors
        return cls(*args, **kwargs)


def _make_if_installed(cls: type[ParalZeROStrategy], *args: Any, **kwargs: Any) -> ParalZeROStrategy | None:
    try:
        check_installed()
    except ConfigurationError as error:
        print(f"paral plan: the configured strategy has no row. {error}", file=sys.stderr)
        return None
    return cls(*args, **kwargs)
