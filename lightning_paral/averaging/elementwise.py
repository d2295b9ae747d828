"""Check that an averaging function is elementwise: only then can it average shards of weights.

The function is tried on small tensors, in full and in two parts; both have to give the same values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_paral.errors import ConfigurationError

_SHAPES = ((6, 5), (7,))
_CUTS = (11, 3)
_TOLERANCE = 1e-5
_NUM_UPDATES = 3


def check_elementwise(name: str, function: Callable[..., Any], *, multi: bool) -> None:
    """Raise a `ConfigurationError` unless an averaging function is elementwise.

    Args:
        name: name of the argument and the callback, for the error.
        function: `avg_fn` or `multi_avg_fn` of `torch.optim.swa_utils.AveragedModel`; its state is restored.
        multi: whether it is a `multi_avg_fn`.
    """
    remedy = "Give one that is elementwise, as those of torch.optim.swa_utils are, or use paral_ddp."
    try:
        with _restoring(function):
            full = _averaged(function, multi, None)
        parts = []
        for part in (0, 1):
            with _restoring(function):
                parts.append(_averaged(function, multi, part))
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot average flat parts of parameters ({type(error).__name__}: {error}), and ranks hold nothing "
            f"else. {remedy}"
        ) from error
    for ours, first, second in zip(full, *parts, strict=True):
        difference = (ours.reshape(-1) - torch.cat([first.reshape(-1), second.reshape(-1)])).abs().max()
        if not difference <= _TOLERANCE:
            raise ConfigurationError(
                f"{name} is not elementwise: averages of parts of a parameter differ from the average of all of it (by "
                f"{float(difference):.1e} in a trial), and ranks hold parts. {remedy}"
            )


def _averaged(function: Callable[..., Any], multi: bool, part: int | None) -> list[Tensor]:
    """Return averages of random tensors, or, with `part`, of one of two flat parts of each."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        drawn = [torch.randn(shape, generator=generator) for shape in _SHAPES]
        return drawn if part is None else [_cut(each, cut)[part] for each, cut in zip(drawn, _CUTS, strict=True)]

    averages = draw()
    for number in range(1, _NUM_UPDATES + 1):
        current, count = draw(), torch.tensor(number)
        if multi:
            function(averages, current, count)
        else:
            averages = [function(average, value, count) for average, value in zip(averages, current, strict=True)]
    return averages


def _cut(tensor: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    flat = tensor.reshape(-1)
    return flat[:cut].clone(), flat[cut:].clone()


@contextmanager
def _restoring(function: Any) -> Iterator[None]:
    """Restore the state of `function` on exit: attributes of it or of its object, and its closure."""
    owner = getattr(function, "__self__", function)
    attributes = {key: _copied(value) for key, value in getattr(owner, "__dict__", {}).items()}
    cells = [cell for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    contents = [_copied(cell.cell_contents) for cell in cells]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        if attributes:
            vars(owner).update(attributes)
        for cell, content in zip(cells, contents, strict=True):
            cell.cell_contents = content


def _copied(value: Any) -> Any:
    if isinstance(value, int | float | str | bytes | bool | type(None)) or callable(value):
        return value
    return deepcopy(value) if isinstance(value, Tensor | dict | list | set | tuple) else copy(value)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
