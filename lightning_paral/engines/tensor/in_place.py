"""The errors of functions that would change a tensor of which each rank has a part."""

from typing import Any

from lightning_paral.engines.tensor.proven import is_in_place, name_of
from lightning_paral.errors import ConfigurationError


def in_place_error(subject: str, what: str, remedy: str) -> ConfigurationError:
    """Return the error for tensors that cannot be changed in place.

    Args:
        subject: what the tensors are.
        what: what has happened to them.
        remedy: a sentence.
    """
    return ConfigurationError(f"{subject} cannot be changed in place. They were {what}. {remedy}")


def error_of_function(function: Any, subject: str, example: str) -> ConfigurationError | None:
    """Return the error if `function` would change its first argument; otherwise `None`.

    Args:
        function: a function of torch.
        subject: what the first argument is.
        example: the name of a variable, for code that the error suggests.
    """
    name = name_of(function)
    if name == "__setitem__":
        what = "assigned to by index"
        remedy = (
            f"Write {example} = {example}.masked_fill(mask, value), {example} = torch.where(mask, values, {example}), "
            f"or assign to a copy: copied = {example} + 0."
        )
    elif name in ("__set__", "__delete__"):
        what, remedy = "given another attribute of a tensor", f"Change a copy: copied = {example} + 0."
    elif not is_in_place(function):
        return None
    elif name.endswith("__"):
        what = f"given to {name}"
        remedy = f"Write {example} = {example} * 2 instead of {example} *= 2, for example."
    else:
        what, remedy = f"given to {name}", f"Write {example} = {example}.{name[:-1]}(...)."
    return in_place_error(subject, what, remedy)
