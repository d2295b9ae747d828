"""Let libraries that import `pytorch_lightning`, the old package of the same code, train with our strategies."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lightning_paral.errors import ConfigurationError

_NEW_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def replace_pytorch_lightning() -> None:
    """Redirect imports of `pytorch_lightning` to `lightning.pytorch`, and of `lightning_fabric` to `lightning.fabric`.

    The old packages are copies, so their classes are others: without this, their Trainer does not know our strategies,
    and Lightning's Trainer rejects their modules and callbacks. Call it at the top of the script, before a library that
    uses the old names is imported. Calling it again changes nothing.

    Raises:
        ConfigurationError: one of the old packages is already imported.
    """
    if any(isinstance(finder, _LightningAlias) for finder in sys.meta_path):
        return
    for name in _NEW_NAMES:
        if name in sys.modules:
            raise ConfigurationError(
                f"replace_pytorch_lightning() was called too late: {name} is already imported. Call it at the top of "
                "the script, right after `import lightning_paral`."
            )
    sys.meta_path.insert(0, _LightningAlias())


class _LightningAlias(MetaPathFinder, Loader):
    """Imports modules of the old packages from `lightning` instead."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of an old package."""
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in _NEW_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace `module` in `sys.modules` by the corresponding module of `lightning`."""
        package, dot, rest = module.__name__.partition(".")
        sys.modules[module.__name__] = importlib.import_module(f"{_NEW_NAMES[package]}{dot}{rest}")
