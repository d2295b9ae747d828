"""`paral plan`: predict memory and traffic of every strategy for a LightningCLI configuration."""

import json
import sys
from typing import Any

import torch
from jsonargparse import Namespace
from torch.nn import Module

from lightning_paral.cli.parser import CommandParser, show
from lightning_paral.cli.train import ConfiguredCLI
from lightning_paral.engines.tensor.plan import make_plan, print_report, report_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.follow import batch_of_shape, first_batch
from lightning_paral.planning.layout import LAYOUTS
from lightning_paral.planning.plan import plan
from lightning_paral.strategies.auto import ParalAutoStrategy
from lightning_paral.text import parse_bytes

_NOT_PLANNED = ("logger", "callbacks", "plugins", "profiler")
"""Options of the Trainer whose objects are not created: they would open files or start other programs."""


def plan_command(arguments: list[str]) -> None:
    """Predict the memory and the traffic of a fit for every strategy, and recommend the cheapest that fits.

    With --tensor-parallel, it prints instead which layers tensor parallelism splits, and how.

    All options that are not listed here are those of `paral fit`, such as --config, --model, --data and
    --trainer.precision. Nothing is trained, and no memory is allocated for the model.
    """
    parser = CommandParser(prog="paral plan", description=plan_command.__doc__)
    add = parser.add_argument
    add("--world-size", type=int, help="number of ranks; without it, trainer.devices times trainer.num_nodes")
    add("--device-memory", help="memory of a device, such as 80GiB; without it, that of this machine's GPU, if any")
    add("--batch-shape", help="instead of the data: shapes and dtypes, such as 8x128:int64,8x128:int64")
    add("--strategies", help="names with commas between them; without it, all strategies")
    add("--tensor-parallel", type=int, metavar="T", help="instead of costs: how T tensor ranks split each layer")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device; cuda if left out")
    add("--json", action="store_true", help="print JSON")
    options, rest = parser.parse_beside_fit(arguments)
    memory = options.device_memory and parse_bytes(options.device_memory, "--device-memory")
    batch = None if options.batch_shape is None else batch_of_shape(options.batch_shape)
    cli = _PlanningCLI(rest)
    if options.tensor_parallel is not None:
        report = _tensor_report(cli, options.tensor_parallel)
        if options.json:
            print(json.dumps(report, indent=2))
        else:
            print_report(report)
        return
    given = cli.trainer_options
    made = plan(
        cli.model,
        first_batch(cli.model, cli.datamodule) if batch is None else batch,
        _configured_world_size(given) if options.world_size is None else options.world_size,
        memory,
        precision=str(given.get("precision") or "32-true"),
        accumulate=int(given.get("accumulate_grad_batches") or 1),
        strategies=_rows(given["strategy"], options.strategies),
        device_type=options.device,
        datamodule=cli.datamodule,
    )
    show(made, options.json)


def _tensor_report(cli: "_PlanningCLI", num_ranks: int) -> dict[str, Any]:
    """Return how the configured plan, or the automatic one, splits the layers over the tensor ranks."""
    configured = getattr(getattr(cli.trainer_options["strategy"], "_options", None), "plan", "auto")
    return report_of(cli.model, num_ranks, make_plan(cli.model, num_ranks, configured))


def _rows(configured: Any, names: str | None) -> list[Any] | None:
    """Return what to plan for: the configured strategy first, if it can be planned, and then the names.

    Args:
        configured: the strategy of the configuration, an object or a name; `None` if there is none.
        names: names with commas between them; `None` for all.
    """
    known = {layout.strategy: layout for layout in LAYOUTS}
    layout = known.get(configured) if isinstance(configured, str) else getattr(configured, "layout", None)
    is_chosen_later = configured in (None, "auto", "paral_auto") or isinstance(configured, ParalAutoStrategy)
    if layout is None and not is_chosen_later:
        name = configured if isinstance(configured, str) else type(configured).__name__
        print(f"paral plan: the configured strategy, {name}, has no row: it cannot be planned.", file=sys.stderr)
    named = list(known) if names is None else [name.strip() for name in names.split(",")]
    return named if layout is None else [layout, *named]


def _configured_world_size(given: dict[str, Any]) -> int:
    """Return the number of ranks in the configuration.

    Raises:
        ConfigurationError: it is not a number there.
    """
    devices = given.get("devices")
    number = str(len(devices) if isinstance(devices, list) else devices)
    if not number.isdigit() or number == "0":
        raise ConfigurationError(
            f"The configuration has devices={devices!r}, which is not a number. Give the number of ranks, for example "
            "--world-size 8."
        )
    return int(number) * (given.get("num_nodes") or 1)


class _PlanningCLI(ConfiguredCLI):
    """Creates the model without memory, the data and the strategy, but no Trainer."""

    def before_instantiate_classes(self) -> None:
        """Remove options of the Trainer whose objects are not needed, and create modules without memory."""
        self.config[self.subcommand].trainer.update(Namespace(dict.fromkeys(_NOT_PLANNED)))  # type: ignore[no-untyped-call]
        self.parser.add_instantiator(_make_on_meta, Module, subclasses=True, prepend=True)


def _make_on_meta(cls: type[Module], *args: Any, **kwargs: Any) -> Module:
    try:
        with torch.device("meta"):
            return cls(*args, **kwargs)
    except Exception:  # it needs values of its tensors
        return cls(*args, **kwargs)
