"""What modules of `compat` declare about each private name they use, so that a test and a start can check it."""

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from lightning_paral.errors import PrivateNameError


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """A private name of torch, Lightning, torchmetrics or DeepSpeed, and why it is used."""

    name: str
    """Dotted path from the library's top: `torch.nn.Module._parameters`."""
    purpose: str
    """What it is used for, as an infinitive: "to read a tensor's version counter"."""
    reason: str
    """Why no public name does."""
    seen: str
    """The versions it was seen in: "torch 2.11 to 2.13"."""
    upstream: str = ""
    """The upstream issue that asks for a public name, or reports the defect worked around."""
    parameters: tuple[str, ...] | None = None
    """Names of the parameters that are relied on, if it is called or replaced."""
    on_instances: bool = False
    """Whether only instances have it: the last part is an attribute that the class before it gives them."""

    def resolve(self) -> Any:
        """Return the object, or for an attribute of instances the class.

        Raises:
            PrivateNameError: the installed version does not have it, or it takes other parameters.
        """
        path, _, last = self.name.rpartition(".")
        try:
            owner = _find(path)
            found = owner if self.on_instances else getattr(owner, last)
        except (ImportError, AttributeError) as error:
            raise PrivateNameError(self._complaint("there is no such name")) from error
        if self.on_instances and not _gives_instances(owner, last):
            raise PrivateNameError(self._complaint(f"{path} has no attribute of that name"))
        if self.parameters is not None:
            names = tuple(inspect.signature(found).parameters)
            if not set(self.parameters) <= set(names):
                raise PrivateNameError(self._complaint(f"it takes ({', '.join(names)}), not {self.parameters}"))
        return found

    def replace_on(self, instance: object, value: Any) -> None:
        """Set an attribute that `instance` has already.

        Raises:
            PrivateNameError: it does not have it: nobody would look at the value.
        """
        last = self.name.rpartition(".")[2]
        if not hasattr(instance, last):
            raise PrivateNameError(self._complaint(f"{type(instance).__name__} has no attribute of that name"))
        setattr(instance, last, value)

    def _complaint(self, what: str) -> str:
        library = self.name.partition(".")[0]
        return (
            f"lightning_paral uses the private name {self.name} {self.purpose}, and in {library} {version(library)} "
            f"{what}. It was tested with {self.seen}: install one of these versions."
        )


def _find(path: str) -> Any:
    """The module or class at a dotted path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def _gives_instances(kind: type, attribute: str) -> bool:
    """Whether `kind` or a class it derives from mentions `attribute`: instances cannot be made of every class."""
    for base in kind.__mro__:
        if attribute in vars(base) or attribute in vars(base).get("__annotations__", {}):
            return True
        try:
            if re.search(rf"\b{attribute}\b", inspect.getsource(base)):
                return True
        except (OSError, TypeError):  # written in C
            continue
    return False
