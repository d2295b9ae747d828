"""The tested versions of torch, Lightning and DeepSpeed. Importing this module warns if others are installed.

It is imported first, so that the warning precedes errors about names that an untested version lacks.
"""

from importlib import metadata

from lightning.pytorch.utilities import rank_zero_warn
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED_VERSIONS = {
    "torch": ">=2.11,<2.14",
    "lightning": ">=2.6.1,!=2.6.2,!=2.6.3,<2.7",
    "deepspeed": ">=0.19.8,<0.20",
}
"""Version specifiers by distribution, equal to those in `pyproject.toml`."""


def oldest_tested(name: str) -> str:
    """Return the oldest tested version of the distribution `name`."""
    return TESTED_VERSIONS[name].partition(",")[0].removeprefix(">=")


def untested(name: str) -> str | None:
    """Return the installed version of the distribution `name` if it is untested; `None` if tested or not installed.

    Local and pre-release builds such as `2.13.0+cpu` and `2.13.0a0+nv25.10` count as the release. Does not import the
    distribution.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    try:
        tested = SpecifierSet(TESTED_VERSIONS[name]).contains(Version(installed).base_version)
    except (InvalidVersion, TypeError):
        tested = False
    return None if tested else str(installed)


def _warn_of_untested() -> None:
    found = {name: version for name in TESTED_VERSIONS if (version := untested(name)) is not None}
    if found:
        tested = ", ".join(name + TESTED_VERSIONS[name] for name in found)
        rank_zero_warn(
            f"lightning_paral was tested with {tested}, but {', '.join(map(' '.join, found.items()))} is installed: "
            "results may differ from those of one process. Install a tested version."
        )


_warn_of_untested()
