"""`paral bench adam`: parse its options, measure, and print the results."""

import argparse
from datetime import timedelta

from lightning_paral.cli.bench.shared import check_rounds, listed, number, progress, show, sizes
from lightning_paral.diagnostics.bench import adam
from lightning_paral.diagnostics.bench.adam import AdamResults, AdamRow
from lightning_paral.diagnostics.bench.adam_report import adam_table, plot_adam
from lightning_paral.diagnostics.bench.ranks import RANK_BYTES, check_free_memory, run_on_ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--sizes", help="numbers of parameters, such as 1M,10M (default: 1M,10M,50M,200M)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--optimizers", help=f"of {', '.join(adam.OPTIMIZERS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds for each size (default: 10)")


def run(options: argparse.Namespace) -> None:
    """Time steps of DeepSpeedCPUAdam beside torch's AdamW: its loop over tensors, foreach and fused."""
    numbers = sizes(options.sizes, adam.DEFAULT_SIZES)
    optimizers = listed(options.optimizers, "--optimizers", adam.OPTIMIZERS)
    threads = [number(text, "--threads") for text in listed(options.threads, "--threads", ())]
    adam.check_adam(optimizers, threads)
    check_rounds(options.rounds)
    check_free_memory(
        f"--sizes {max(numbers)}", RANK_BYTES + adam.BYTES_PER_PARAMETER * max(numbers), "Give smaller sizes."
    )
    rows: list[AdamRow] = []
    with progress(options) as on_progress:
        for count in threads:
            (found,) = run_on_ranks(
                f"{adam.__name__}:{adam.measure_adam.__name__}",
                {"optimizers": optimizers, "sizes": numbers, "rounds": options.rounds},
                num_ranks=1,
                num_threads=count,
                timeout=timedelta(minutes=options.timeout),
                on_progress=on_progress,
            )
            rows += [AdamRow(**row) for row in found]
    results = AdamResults(rows=tuple(rows))
    show(options, "adam", results.as_json(), adam_table(results), lambda: plot_adam(results))
