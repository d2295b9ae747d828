"""Which versions of torch, Lightning and DeepSpeed the tests run with; importing this warns where others are installed.

It is imported before all else, so that the warning comes before errors about names that another version lacks.
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
"""By distribution, from the oldest on; `pyproject.toml` states the same."""


def oldest_tested(name: str) -> str:
    """Return the lowest version of the distribution `name` that is tested."""
    return TESTED_VERSIONS[name].partition(",")[0].removeprefix(">=")


def untested(name: str) -> str | None:
    """Return the installed version of the distribution `name` if it is not a tested one. Nothing is imported for it.

    Builds of a version, `2.13.0+cpu` or `2.13.0a0+nv25.10`, count as that version. `None` where it is not installed.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    try:
        tested = SpecifierSet(TESTED_VERSIONS[name]).contains(Version(installed), prereleases=True)
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
