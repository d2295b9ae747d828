"""`paral check`: prove on a LightningCLI configuration that training under a strategy equals one process."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.strategies import Strategy
from rich.console import Console

from lightning_paral.cli.parser import CommandParser, show
from lightning_paral.cli.train import ConfiguredCLI
from lightning_paral.diagnostics.check import DEFAULT, by_name, check_project
from lightning_paral.diagnostics.check_run import Fit
from lightning_paral.errors import ConfigurationError
from lightning_paral.strategies.base import ParalStrategy
from lightning_paral.strategies.dp import ParalDPStrategy


def check_command(arguments: list[str]) -> None:
    """Train a few steps in one process and under each strategy, and compare every value that a step leaves behind.

    Losses, logged values, learning rates, gradients, parameters, buffers, an evaluation, and a checkpoint that another
    strategy resumes. All options that are not listed here are those of `paral fit`, such as --config, --model and
    --trainer.precision. The exit status is 0 if all strategies are equal or refused, 1 if one differs, and 2 if the run
    in one process fails.
    """
    parser = CommandParser(prog="paral check", description=check_command.__doc__)
    add = parser.add_argument
    default = f"default: that of the configuration, and {','.join(DEFAULT)}"
    add("--strategies", help=f"names with commas between them, or all ({default})")
    add("--ranks", type=int, default=2, help="number of ranks to start on this machine (default: 2)")
    add("--steps", type=int, default=8, help="number of optimizer steps (default: 8)")
    add("--accelerator", choices=("cpu", "cuda"), default="cpu", help="kind of device (default: cpu)")
    add("--timeout", type=float, default=300.0, help="seconds after which a run hangs (default: 300)")
    add("--keep-dropout", action="store_true", help="leave dropout on, which differs between ranks")
    add("--json", action="store_true", help="print JSON instead of a table")
    options, rest = parser.parse_beside_fit(arguments)
    given = {name: value for name, value in vars(options).items() if name not in ("strategies", "json")}
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # says each seed
    try:
        with _at_work("paral check") as progress:
            cli = Configured(rest).cli()
            strategies = _strategies(options.strategies, cli.trainer_options["strategy"])
            report = check_project(Configured(rest), strategies, seed=cli.seed, progress=progress, **given)
    except ConfigurationError as error:
        print(f"paral: {error}", file=sys.stderr)
        sys.exit(2)
    show(report, options.json)
    if not all(row.is_allowed for row in report.rows):
        sys.exit(1)


@contextmanager
def _at_work(command: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that a command works, and what it does, with the function that this yields.

    Libraries print to stdout when they are imported. It becomes stderr here, so that JSON stays readable.
    """
    with redirect_stdout(sys.stderr), Console(stderr=True).status(command) as status:
        yield lambda what: status.update(f"{command}: {what}")


def _strategies(given: str | None, configured: Any) -> Any:
    """Return the strategies with the given names; without them, that of the configuration first, and the default."""
    if given is not None:
        return "all" if given == "all" else [name.strip() for name in given.split(",")]
    first: dict[str, Any] = {}
    if isinstance(configured, str) and configured.startswith("paral_"):
        first = by_name([configured])
    elif isinstance(configured, ParalStrategy | ParalDPStrategy):
        first = {"configured": partial(_same, configured)}
    return first | by_name(DEFAULT)


def _same(strategy: Strategy) -> Strategy:
    return strategy  # each run gets a copy of its own, because it is pickled


@dataclass(frozen=True)
class Configured:
    """Makes the module, the data and the callbacks of a configuration, in the process that calls it."""

    arguments: Sequence[str]

    def cli(self) -> ConfiguredCLI:
        """Create the objects of the configuration, except those that write files."""
        return ConfiguredCLI([*self.arguments, "--trainer.logger=false", "--trainer.profiler=null"])

    def __call__(self) -> Fit:
        """Return what a run trains."""
        made = self.cli()
        return Fit(module=made.model, data=made.datamodule, trainer=made.trainer_options)
