"""`paral bench checkpoint`: parse its options, measure, and print the results."""

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path

from lightning_paral.cli.bench.shared import check_rounds, listed, progress, show
from lightning_paral.diagnostics.bench import checkpoint
from lightning_paral.diagnostics.bench.checkpoint_report import checkpoint_table, plot_checkpoint
from lightning_paral.diagnostics.bench.ranks import check_num_ranks
from lightning_paral.diagnostics.bench.task import check_config
from lightning_paral.errors import ConfigurationError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    names = ",".join(checkpoint.DEFAULT_STRATEGIES)
    parser.add_argument("--strategies", help=f"names of strategies (default: {names})")
    parser.add_argument(
        "--config", help="LightningCLI configuration with `model` and `data` (default: a small Transformer)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--folder", help="a folder on the disk to be measured (default: that of temporary files)")
    parser.add_argument("--cold", action="store_true", help="read files from the disk, not from the page cache")


def run(options: argparse.Namespace) -> None:
    """Time saving, the stall of an asynchronous save, loading and consolidating, beside plain files."""
    strategies = listed(options.strategies, "--strategies", checkpoint.DEFAULT_STRATEGIES)
    checkpoint.check_checkpoint_strategies(strategies)
    checkpoint.check_folder(options.folder)
    check_rounds(options.rounds)
    if options.cold and not hasattr(os, "posix_fadvise"):
        raise ConfigurationError("--cold needs posix_fadvise, which this system does not have. Leave it out.")
    if options.config is not None:
        check_config(options.config)
    check_num_ranks(options.ranks)
    with (
        progress(options) as on_progress,
        tempfile.TemporaryDirectory(prefix="paral-bench-", dir=options.folder) as folder,
    ):
        results = checkpoint.measure_checkpoints(
            strategies,
            config=options.config,
            num_ranks=options.ranks,
            rounds=options.rounds,
            folder=Path(folder),
            timeout=timedelta(minutes=options.timeout),
            cold=options.cold,
            on_progress=on_progress,
        )
    show(options, "checkpoint", results.as_json(), checkpoint_table(results), lambda: plot_checkpoint(results))
