"""Write the generated parts of the documentation: `python -m tests.docs --write`.

Without `--write`, print the files that are not up to date and exit with 1 if there are any. A plot is drawn again if
its data have changed; `--plots` draws all of them. Drawing needs matplotlib, which the extra `docs` installs.
"""

import argparse
import sys

from tests.docs.generated import ROOT, stale_files


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files that are not up to date")
    parser.add_argument("--plots", action="store_true", help="write all plots, even if their data have not changed")
    options = parser.parse_args()
    stale = stale_files(redraw=options.plots)
    writes = options.write or options.plots
    for path, render in stale.items():
        if writes:
            path.write_text(render())
        print("written" if writes else "not up to date", path.relative_to(ROOT))
    if stale and not writes:
        sys.exit(1)


if __name__ == "__main__":
    main()
