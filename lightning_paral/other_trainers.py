"""Reject our strategies in Fabric and in `pytorch_lightning`, which cannot run them, and say what to use.

The packages `pytorch_lightning` and `lightning_fabric` are copies of `lightning.pytorch` and `lightning.fabric` under
the old names. An object of one package is not an instance of the other package's classes.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning.fabric import connector
from lightning.pytorch.strategies import Strategy

from lightning_paral.compat.lightning.strategy_lookup import check_before_lookup
from lightning_paral.errors import ConfigurationError

_NEW_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_FABRIC = (
    "{given} is a strategy for Lightning's Trainer. Fabric has no Trainer to call its hooks. Use "
    "lightning.pytorch.Trainer(strategy={given}), or one of Fabric's own strategies: 'ddp', 'fsdp', 'deepspeed'."
)
_PYTORCH_LIGHTNING = (
    "{given} is a strategy for the package lightning, but this Trainer comes from pytorch_lightning, an older name of "
    "the same code, whose classes are different objects. Import everything from lightning: `import lightning.pytorch "
    "as pl`. If a library imports pytorch_lightning, call lightning_paral.replace_pytorch_lightning() at the top of "
    "the script, before the library is imported."
)
_REFUSALS = {
    "pytorch_lightning.trainer.connectors.accelerator_connector": _PYTORCH_LIGHTNING,
    "lightning_fabric.connector": _FABRIC,
}
"""The error message for our strategies, by the module that looks up strategies."""


def refuse_in_other_trainers(names: Sequence[str]) -> None:
    """Make Fabric, and `pytorch_lightning` once it is imported, reject our strategies with an explanation.

    Args:
        names: the names of our strategies.
    """
    check_before_lookup(connector, _make_check(names, _FABRIC))
    for finder in [finder for finder in sys.meta_path if type(finder).__name__ == _PostImportFinder.__name__]:
        sys.meta_path.remove(finder)  # from an earlier call

    def refuse_in(module: ModuleType) -> None:
        with suppress(AttributeError):  # importing an untested version must not fail
            check_before_lookup(module, _make_check(names, _REFUSALS[module.__name__]))

    awaited = set()
    for name in _REFUSALS:
        if name in sys.modules and sys.modules[name].__name__ == name:
            refuse_in(sys.modules[name])
        elif name not in sys.modules:
            awaited.add(name)
    sys.meta_path.insert(0, _PostImportFinder(awaited, refuse_in))


def replace_pytorch_lightning() -> None:
    """Redirect imports of `pytorch_lightning` to `lightning.pytorch`, and of `lightning_fabric` to `lightning.fabric`.

    Modules and callbacks of libraries that use the old names then work with Lightning's Trainer and our strategies.
    Call it at the top of the script, before such a library is imported. Calling it again changes nothing.

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


def _make_check(ours: Sequence[str], message: str) -> Callable[[Any], None]:
    """Return a function that raises an error if its argument is one of our strategies, or the name of one."""

    def refuse(strategy: Any) -> None:
        name = strategy.lower() if isinstance(strategy, str) else None
        if name is not None and (name in ours or name.startswith("paral_")):
            raise ConfigurationError(message.format(given=repr(strategy)))
        cls = strategy if isinstance(strategy, type) else type(strategy)
        if issubclass(cls, Strategy) and any(base.__module__.startswith("lightning_paral.") for base in cls.__mro__):
            raise ConfigurationError(message.format(given=f"{cls.__name__}()"))

    return refuse


class _PostImportFinder(MetaPathFinder):
    """Calls a function with each of the named modules after the module is imported."""

    def __init__(self, names: set[str], then: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from another finder, with a loader that calls the function after executing the module."""
        if fullname not in self._names:
            return None
        self._names.discard(fullname)
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run, then = spec.loader.exec_module, self._then

            def run_then(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec


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
