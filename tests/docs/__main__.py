"""Write the generated parts of the documentation: `python -m tests.docs --write`.

Without `--write`, print the files that are not up to date and exit with 1 if there are any.
"""

import argparse
import sys

from tests.docs.generated import stale_files, write_all

parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
parser.add_argument("--write", action="store_true", help="write the files that are not up to date")
if parser.parse_args().write:
    write_all()
elif stale := stale_files():
    sys.exit("not up to date: " + ", ".join(path.name for path in stale))
