"""Run faults and print how they end. The docstring of the package says how."""

import argparse
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import tests.distributed.faults as package
from tests.distributed.faults.cases import Case, all_cases, select
from tests.distributed.faults.runs import run, stopping
from tests.network import why_no_nodes


def chosen(options: argparse.Namespace) -> list[Case]:
    cases = select(all_cases(), options.only)
    if options.sample is not None:
        cases = random.Random(0).sample(cases, min(options.sample, len(cases)))
    if any(case.nodes > 1 for case in cases) and (why := why_no_nodes()):
        print(f"Left out the runs over two nodes: {why}")
        cases = [case for case in cases if case.nodes == 1]
    return cases


def run_all(cases: list[Case], jobs: int) -> int:
    """Return how many of the cases did not end as they should."""
    num_wrong = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, case) for case in cases]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                result = future.result()
                faults = result.faults()
                num_wrong += bool(faults)
                told = ", ".join(faults) or "as it should"
                print(f"{number:3} of {len(cases)}   {result.seconds:.1f} s, {told}: {result.case}", flush=True)
        finally:
            stopping.set()  # after an interruption, ends what is running
            pool.shutdown(cancel_futures=True)
    return num_wrong


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("faults", description=package.__doc__, formatter_class=formatter)
    parser.add_argument("--only", metavar="KEY=VALUE,...", default="", help="run the faults that match")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of the faults, drawn at random")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    options = parser.parse_args()
    # A shell ignores SIGINT in its background jobs, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    num_wrong = run_all(chosen(options), options.jobs)
    print(f"{num_wrong} did not end as they should")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
