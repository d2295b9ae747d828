"""`paral bench memory`: parse its options, measure, and print the results."""

import argparse
from datetime import timedelta

from lightning_paral.cli.bench.shared import listed, number, progress, show
from lightning_paral.diagnostics.bench import memory
from lightning_paral.diagnostics.bench.memory_plan import check_memory_strategies
from lightning_paral.diagnostics.bench.memory_report import memory_table, plot_memory
from lightning_paral.diagnostics.bench.ranks import check_num_ranks
from lightning_paral.diagnostics.bench.resident import check_resident_peak
from lightning_paral.diagnostics.bench.task import check_config, check_overrides
from lightning_paral.errors import ConfigurationError

TAKES_OVERRIDES = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.epilog = "Options of the module and the data follow, such as --model.width 1024 --data.batch_size 1."
    names = ",".join(memory.DEFAULT_STRATEGIES)
    parser.add_argument("--strategies", help=f"names of strategies (default: {names})")
    parser.add_argument(
        "--config", help="LightningCLI configuration with `model` and `data` (default: a small Transformer)"
    )
    default = ",".join(map(str, memory.DEFAULT_RANKS))
    parser.add_argument("--ranks", default=default, help=f"numbers of ranks on this machine (default: {default})")


def run(options: argparse.Namespace) -> None:
    """Measure the peak memory of a rank beside a limit and the planner's prediction, and the time to the first step."""
    check_resident_peak()
    strategies = listed(options.strategies, "--strategies", memory.DEFAULT_STRATEGIES)
    check_memory_strategies(strategies)
    num_ranks = [number(text, "--ranks") for text in listed(options.ranks, "--ranks", ())]
    for count in num_ranks:
        if num_ranks.count(count) > 1:
            raise ConfigurationError(f"--ranks names {count} twice.")
        check_num_ranks(count)
    check_overrides(options.overrides)
    if options.config is not None:
        check_config(options.config)
    with progress(options) as on_progress:
        results = memory.measure_memory(
            strategies,
            config=options.config,
            overrides=options.overrides,
            num_ranks=num_ranks,
            timeout=timedelta(minutes=options.timeout),
            on_progress=on_progress,
        )
    show(options, "memory", results.as_json(), memory_table(results), lambda: plot_memory(results))
