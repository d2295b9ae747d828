"""`paral bench comm`: parse its options, measure, and print the results."""

import argparse
from datetime import timedelta

from lightning_paral.cli.bench.shared import check_rounds, listed, progress, show, sizes
from lightning_paral.diagnostics.bench.comm import (
    ALGORITHMS,
    COPIES,
    DEFAULT_SIZES,
    WIRES,
    CommResults,
    check_comm,
    measure_comm,
)
from lightning_paral.diagnostics.bench.comm_report import comm_table, plot_comm
from lightning_paral.diagnostics.bench.rank import rank_of_launcher
from lightning_paral.diagnostics.bench.ranks import check_num_ranks, run_on_ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--sizes", help="sizes of the fp32 tensors, such as 64KiB,1MiB (default: 64KiB to 256MiB)")
    parser.add_argument("--algorithms", help=f"of {', '.join(ALGORITHMS)} (default: all)")
    parser.add_argument("--wire", default="fp32,bf16", help=f"dtypes of messages, of {', '.join(WIRES)}")
    parser.add_argument("--rounds", type=int, default=10, help="rounds for each size (default: 10)")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="no more rounds for a size after so long (default: 15)"
    )


def run(options: argparse.Namespace) -> None:
    """Time collectives by algorithm, wire dtype and size. Under torchrun, it uses the ranks that torchrun starts."""
    timeout = timedelta(minutes=options.timeout)
    rank = rank_of_launcher(timeout)
    numbers = sizes(options.sizes, DEFAULT_SIZES)
    algorithms, wires = listed(options.algorithms, "--algorithms", ALGORITHMS), listed(options.wire, "--wire", WIRES)
    num_ranks = options.ranks if rank is None else rank.world_size
    if rank is None:
        check_num_ranks(num_ranks, data_bytes=COPIES * max(numbers))
    check_comm(algorithms, wires, numbers, num_ranks)
    check_rounds(options.rounds)
    settings = {
        "algorithms": algorithms,
        "wires": wires,
        "sizes": numbers,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    if rank is None:
        with progress(options) as on_progress:
            (record, *_) = run_on_ranks(
                f"{measure_comm.__module__}:{measure_comm.__name__}",
                settings,
                num_ranks=num_ranks,
                timeout=timeout,
                on_progress=on_progress,
            )
    else:
        record = measure_comm(rank, **settings)
    if rank is None or rank.rank == 0:
        results = CommResults.from_json(record)
        show(options, "comm", results.as_json(), comm_table(results), lambda: plot_comm(results))
