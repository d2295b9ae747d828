"""`paral bench step`: parse its options, measure, and print the results."""

import argparse
from datetime import timedelta

from lightning_paral.cli.bench.shared import check_rounds, listed, progress, show
from lightning_paral.diagnostics.bench import step
from lightning_paral.diagnostics.bench.ranks import check_num_ranks
from lightning_paral.diagnostics.bench.step_report import plot_step, step_table
from lightning_paral.diagnostics.bench.task import check_config
from lightning_paral.errors import ConfigurationError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--strategies", help=f"names of strategies (default: {','.join(step.DEFAULT_STRATEGIES)})")
    parser.add_argument(
        "--config", help="LightningCLI configuration with `model` and `data` (default: a small Transformer)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each strategy (default: 6)")
    parser.add_argument("--steps", type=int, default=10, help="steps in each turn (default: 10)")


def run(options: argparse.Namespace) -> None:
    """Time training steps under strategies of this package, of Lightning, and in hand-written loops."""
    strategies = listed(options.strategies, "--strategies", step.DEFAULT_STRATEGIES)
    step.check_strategies(strategies)
    check_rounds(options.rounds)
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps} is not a number of steps. Give at least 1.")
    if options.config is not None:
        check_config(options.config)
    check_num_ranks(options.ranks, num_groups=len(strategies))
    with progress(options) as on_progress:
        results = step.measure_steps(
            strategies,
            config=options.config,
            num_ranks=options.ranks,
            rounds=options.rounds,
            steps=options.steps,
            timeout=timedelta(minutes=options.timeout),
            on_progress=on_progress,
        )
    show(options, "step", results.as_json(), step_table(results), lambda: plot_step(results))
