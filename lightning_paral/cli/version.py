"""`paral --version`: print the versions to include in a bug report."""

import platform
from importlib import metadata

from lightning_paral._version import __version__

_PACKAGES = ("lightning", "torch", "deepspeed")


def print_version() -> None:
    """Print the versions of this package, Python, Lightning, torch and DeepSpeed."""
    others = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    print(f"lightning_paral {__version__} (Python {platform.python_version()}, {', '.join(others)})")
