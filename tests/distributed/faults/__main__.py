"""Run faults and print the table. The docstring of the package says how."""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import tests.distributed.faults as package
from tests.distributed.faults.cases import Case, all_cases, sample, select
from tests.distributed.faults.runs import Result, run, stopping
from tests.distributed.faults.table import describe, format_table
from tests.network import why_no_nodes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.faults",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="run every fault")
    parser.add_argument(
        "--only",
        action="append",
        metavar="KEY=VALUE,...",
        help="run the faults that match; may be repeated",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="run N of the faults, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--list", action="store_true", help="print the faults instead of running them")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the output of each run to FOLDER")
    options = parser.parse_args()
    if not (options.all or options.only or options.sample or options.list):
        parser.error("nothing to do: give --all, --only, --sample or --list")
    return options


def chosen(options: argparse.Namespace) -> list[Case]:
    wanted = options.only or [""]
    cases = [case for case in all_cases() if any(select([case], each) for each in wanted)]
    if options.sample is not None:
        cases = sample(cases, options.sample, options.seed)
    why = why_no_nodes() if any(case.nodes > 1 for case in cases) and not options.list else None
    if why is not None:
        print(f"Left out the runs over two nodes: {why}")
        cases = [case for case in cases if case.nodes == 1]
    return cases


def main() -> int:
    options = parse()
    cases = chosen(options)
    if options.list:
        print("\n".join(map(str, cases)))
        print(f"{len(cases)} faults")
        return 0
    # A shell ignores SIGINT in its background jobs, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{len(cases)} faults, {options.jobs} at a time", flush=True)
    started = time.monotonic()
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run, case, options.keep) for case in cases]
        try:
            for future in as_completed(futures):
                result = future.result()
                results.append(result)
                told = describe(result) if result.faults else f"  {result.seconds:.1f} s: {result.case}"
                print(f"{len(results):3} {told}", flush=True)
        finally:
            stopping.set()  # after an interruption, ends what is running
            pool.shutdown(cancel_futures=True)
    load = os.getloadavg()[1] / (os.cpu_count() or 1)
    print(f"\n{len(results)} faults in {time.monotonic() - started:.0f} s, at a load of {load:.1f} a core")
    print(f"\n{format_table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps([result.to_json() for result in results], indent=1))
    return int(any(result.faults and result.case.strategy != "ddp" for result in results))


if __name__ == "__main__":
    sys.exit(main())
