"""Run faults and print the table. The docstring of the package says how."""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from statistics import median

import tests.distributed.faults as package
from tests.distributed.faults.cases import Case, all_cases, select
from tests.distributed.faults.runs import Result, run, stopping
from tests.network import why_no_nodes
from tests.tables import markdown

HEADINGS = ("runs", "shown", "at end", "once", "median s", "worst s", "orphans", "wrong status")
BY: dict[str, Callable[[Result], str]] = {
    "strategy, launcher": lambda result: f"{result.case.strategy}, {result.case.launcher}",
    "fault": lambda result: result.case.fault,
    "stage": lambda result: result.case.stage,
    "nodes": lambda result: f"{result.case.nodes} ({result.case.ranks} ranks)",
}
"""What the tables group by."""


def chosen(options: argparse.Namespace) -> list[Case]:
    cases = select(all_cases(), options.only or "")
    if options.sample is not None:
        cases = random.Random(options.seed).sample(cases, min(options.sample, len(cases)))
    if any(case.nodes > 1 for case in cases) and not options.list and (why := why_no_nodes()):
        print(f"Left out the runs over two nodes: {why}")
        cases = [case for case in cases if case.nodes == 1]
    return cases


def row(name: str, results: list[Result]) -> tuple[str, ...]:
    reached = [result for result in results if result.has_failed]
    seconds = [result.seconds for result in reached] or [0.0]
    with_traceback = [result.times == 1 for result in reached if result.case.has_traceback]

    def percent(values: list[bool]) -> str:
        return f"{100 * sum(values) / len(values):.0f} %" if values else ""

    shown, at_end = percent([each.shown for each in reached]), percent([each.at_end for each in reached])
    times = (f"{median(seconds):.1f}", f"{max(seconds):.1f}")
    wrong = (sum(result.orphans for result in reached), sum(not result.is_status_right for result in reached))
    return (name, f"{len(results)}", shown, at_end, percent(with_traceback), *times, *map(str, wrong))


def run_all(cases: list[Case], jobs: int) -> list[Result]:
    results: list[Result] = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, case) for case in cases]
        try:
            for future in as_completed(futures):
                results.append(result := future.result())
                wrong = f"{', '.join(result.faults)}: python -m tests.distributed.faults --only "
                told = wrong if result.faults else f"{result.seconds:.1f} s: "
                print(f"{len(results):3}   {told}{result.case}", flush=True)
        finally:
            stopping.set()  # after an interruption, ends what is running
            pool.shutdown(cancel_futures=True)
    return results


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("faults", description=package.__doc__, formatter_class=formatter)
    parser.add_argument("--all", action="store_true", help="run every fault")
    parser.add_argument("--only", metavar="KEY=VALUE,...", help="run the faults that match")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of the faults, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--list", action="store_true", help="print the faults instead of running them")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    options = parser.parse_args()
    if not (options.all or options.only or options.sample or options.list):
        parser.error("nothing to do: give --all, --only, --sample or --list")
    cases = chosen(options)
    if options.list:
        print("\n".join(map(str, cases)), f"{len(cases)} faults", sep="\n")
        return 0
    # A shell ignores SIGINT in its background jobs, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    results = run_all(cases, options.jobs)
    load = os.getloadavg()[1] / (os.cpu_count() or 1)
    print(f"\n{len(results)} faults in {time.monotonic() - started:.0f} s, at a load of {load:.1f} a core")
    for title, key in BY.items():
        groups: dict[str, list[Result]] = {}
        for result in sorted(results, key=key):
            groups.setdefault(key(result), []).append(result)
        print(f"\n{markdown((title, *HEADINGS), [row(name, group) for name, group in groups.items()])}")
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
