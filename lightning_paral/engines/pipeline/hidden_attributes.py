"""Give a module another attribute for a while, such as a step that runs the user's step for each micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


@contextmanager
def with_attribute(module: Module, name: str, value: Any) -> Iterator[None]:
    """Inside the block, make `module.name` be `value`, which hides the method of the class."""
    attributes = vars(module)
    hidden = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        if hidden is not None:
            attributes[name] = hidden
