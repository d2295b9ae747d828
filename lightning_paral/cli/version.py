"""`paral --version`: the versions that a report of a defect has to name."""

import platform
from importlib import metadata

from lightning_paral._version import __version__

_PACKAGES = ("lightning", "torch", "deepspeed")


def print_version() -> None:
    """Print the version of this package, and those of Python and of the packages that decide how it behaves."""
    others = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    print(f"lightning_paral {__version__} (Python {platform.python_version()}, {', '.join(others)})")
