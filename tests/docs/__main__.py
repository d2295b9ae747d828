"""Write the generated parts of the documentation: `python -m tests.docs --write`.

Without `--write`, print the pages that are not up to date and exit with 1 if there are any.
"""

import argparse
import sys

from tests.docs.generated import PAGES, ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them")
    options = parser.parse_args()
    stale = 0
    for path, render in PAGES.items():
        text = render()
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        if options.write:
            path.write_text(text)
        print("written" if options.write else "not up to date", path.relative_to(ROOT))
    if stale and not options.write:
        sys.exit(1)


if __name__ == "__main__":
    main()
