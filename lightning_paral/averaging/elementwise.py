"""Check that an averaging function is elementwise, since only such a function can average shards of weights.

The function is called with small full tensors, and with two shards of each. Both must give the same averages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_paral.errors import ConfigurationError

_SHAPES = ((6, 5), (7,))
_SPLIT_AT = (11, 3)
_TOLERANCE = 1e-5
_NUM_UPDATES = 3


def check_elementwise(name: str, function: Callable[..., Any], *, multi: bool) -> None:
    """Raise a `ConfigurationError` unless an averaging function is elementwise.

    Args:
        name: name of the argument and of the callback, for the error message.
        function: `avg_fn` or `multi_avg_fn` of `torch.optim.swa_utils.AveragedModel`; its state is restored.
        multi: whether it is a `multi_avg_fn`.
    """
    remedy = "Give an elementwise function, such as those of torch.optim.swa_utils, or use paral_ddp."
    try:
        with _restoring_state(function):
            full = _run_trial(function, multi, None)
        shards = []
        for shard in (0, 1):
            with _restoring_state(function):
                shards.append(_run_trial(function, multi, shard))
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot average flat shards of parameters ({type(error).__name__}: {error}), but ranks hold only "
            f"shards. {remedy}"
        ) from error
    for ours, first, second in zip(full, *shards, strict=True):
        difference = (ours.reshape(-1) - torch.cat([first.reshape(-1), second.reshape(-1)])).abs().max()
        if not difference <= _TOLERANCE:
            raise ConfigurationError(
                f"{name} is not elementwise: averages of shards of a parameter differ from the average of the full "
                f"parameter (by {float(difference):.1e} in a trial), but ranks hold shards. {remedy}"
            )


def _run_trial(function: Callable[..., Any], multi: bool, shard: int | None) -> list[Tensor]:
    """Return averages of random tensors, or, if `shard` is 0 or 1, of the first or second flat shard of each."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        drawn = [torch.randn(shape, generator=generator) for shape in _SHAPES]
        if shard is None:
            return drawn
        return [_split(each, index)[shard] for each, index in zip(drawn, _SPLIT_AT, strict=True)]

    averages = draw()
    for number in range(1, _NUM_UPDATES + 1):
        current, count = draw(), torch.tensor(number)
        if multi:
            function(averages, current, count)
        else:
            averages = [function(average, value, count) for average, value in zip(averages, current, strict=True)]
    return averages


def _split(tensor: Tensor, index: int) -> tuple[Tensor, Tensor]:
    flat = tensor.reshape(-1)
    return flat[:index].clone(), flat[index:].clone()


@contextmanager
def _restoring_state(function: Any) -> Iterator[None]:
    """Restore the state of `function` on exit: its closure and attributes, or, for a method, those of its object."""
    owner = getattr(function, "__self__", function)
    attributes = {key: _copy_value(value) for key, value in getattr(owner, "__dict__", {}).items()}
    cells = [cell for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    contents = [_copy_value(cell.cell_contents) for cell in cells]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        if attributes:
            vars(owner).update(attributes)
        for cell, content in zip(cells, contents, strict=True):
            cell.cell_contents = content


def _copy_value(value: Any) -> Any:
    if isinstance(value, int | float | str | bytes | bool | type(None)) or callable(value):
        return value
    return deepcopy(value) if isinstance(value, Tensor | dict | list | set | tuple) else copy(value)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
