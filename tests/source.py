"""The modules of the package, parsed once for all tests that look at its source."""

import ast
from functools import cache
from pathlib import Path

import lightning_paral

PACKAGE = Path(lightning_paral.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees by file below the package, such as `engines/ddp/run.py`."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
