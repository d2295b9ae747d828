"""Step on one piece of a flat tensor after another, so that temporary tensors of the optimizer are small.

torch's Adam on CPU allocates two temporary tensors as long as the parameter. Under DDP this is the longest parameter;
the flat tensors of ZeRO are as long as all shards of a rank.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

PIECE_NUMEL = 2**20
"""The number of elements per piece: 4 MiB of fp32. A power of two, so that vectorized loops end where they did."""


def can_step_in_pieces(optimizer: Optimizer) -> bool:
    """Return whether `step` may run several times for each step: torch's own optimizers count steps per parameter."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step_in_pieces(optimizer: Optimizer, piece_numel: int = PIECE_NUMEL) -> None:
    """Make `optimizer.step` work in pieces of flat parameters. Results stay the same, bit for bit.

    Memory during a step: the temporary tensors of `piece_numel` elements.

    Args:
        optimizer: an elementwise optimizer for which `can_step_in_pieces`. Its parameters are 1-dimensional.
        piece_numel: the number of elements per piece.
    """
    step: Any = optimizer.step

    def step_on_pieces(*args: Any, **kwargs: Any) -> Any:
        flats = [(group, flat) for group in optimizer.param_groups for flat in group["params"]]
        if len(flats) != 1 or flats[0][1].numel() <= piece_numel or flats[0][1].grad is None:
            return step(*args, **kwargs)
        ((group, flat),) = flats
        old: dict[str, Any] = optimizer.state.pop(flat, {})
        new: dict[str, Any] = {}
        result = None
        try:
            for start in range(0, flat.numel(), piece_numel):
                piece = flat.detach()[start : start + piece_numel]
                piece.grad = flat.grad[start : start + piece_numel]
                group["params"] = [piece]
                if old:
                    optimizer.state[piece] = {
                        key: _piece_of(value, flat, start, piece_numel) for key, value in old.items()
                    }
                outcome = step(*args, **kwargs) if start == 0 else step()
                result = outcome if start == 0 else result
                _collect(optimizer.state.pop(piece, {}).items(), piece, start, flat, old, new)
        finally:
            group["params"] = [flat]
            if old or new:
                optimizer.state[flat] = old | new
        return result

    optimizer.step = step_on_pieces  # type: ignore[method-assign]


def _piece_of(value: Any, flat: Tensor, start: int, numel: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[start : start + numel] if _is_per_element(value, flat) else value.clone()


def _is_per_element(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _collect(
    state: Iterable[tuple[str, Any]], piece: Tensor, start: int, flat: Tensor, old: dict[str, Any], new: dict[str, Any]
) -> None:
    """Copy the state of a piece into `new`; tensors with a value per element that `old` has are updated in place."""
    for key, value in state:
        if not _is_per_element(value, piece):
            new[key] = value
            continue
        if key not in new:
            kept = old.get(key)
            new[key] = kept if _is_per_element(kept, flat) else value.new_empty(flat.shape)
        target = new[key][start : start + piece.numel()]
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)
