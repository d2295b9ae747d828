"""Say in words where a thread is: in which function of the user, and in which collective it waits."""

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from types import CodeType, FrameType

from lightning_paral.compat.torch.fsdp_names import unit_name
from lightning_paral.compat.torch.waits import BACKWARD, OF_DDP
from lightning_paral.distributed.hangs.user_frames import library_of

_INNER_LIBRARY_FRAMES = 2
"""How many of the innermost frames a folded stack shows even if they belong to libraries."""


@dataclass(frozen=True)
class Position:
    """Where a thread is."""

    what: str
    """What it waits for, such as ``in `all_reduce` ``; empty if it does not wait for other ranks or for data."""
    where: str
    """The function of the user, such as `` `training_step` (train.py:41) ``."""
    waits_for_ranks: bool
    """Whether it waits for other ranks."""


@dataclass(frozen=True)
class _Wait:
    """What a frame of a library says about waiting. Of several in a stack, the one with the highest rank counts."""

    rank: int
    what: str
    for_ranks: bool = True


def position_of(frames: Sequence[FrameType]) -> Position:
    """Return the position of the thread with these frames, innermost first."""
    own = next((index for index, each in enumerate(frames) if not library_of(each.f_code.co_filename)), len(frames))
    found: _Wait | None = None
    for each in frames[:own]:
        wait = wait_of(each.f_code)
        if wait is not None and (found is None or wait.rank >= found.rank):
            found = _with_name(wait, each)
    return Position(found.what if found else "", _where(frames, own), found is not None and found.for_ranks)


def fold_stack(frames: Sequence[FrameType]) -> str:
    """Return the stack of a thread, outermost call first. Calls of libraries are counted, except the innermost.

    Args:
        frames: the frames of the thread, innermost first.
    """
    frames = frames[::-1]
    summaries = traceback.StackSummary.extract((each, each.f_lineno) for each in frames)
    names = [library_of(each.f_code.co_filename) for each in frames]
    for index in range(max(0, len(names) - _INNER_LIBRARY_FRAMES), len(names)):
        names[index] = ""
    lines: list[str] = []
    for is_library, group in groupby(zip(summaries, names, strict=True), key=lambda pair: bool(pair[1])):
        pairs = list(group)
        if is_library:
            libraries = ", ".join(dict.fromkeys(name for _, name in pairs))
            lines.append(f"  ... {len(pairs)} call{'s' * (len(pairs) > 1)} in {libraries}\n")
        else:
            lines += traceback.format_list([summary for summary, _ in pairs])
    return "".join(lines)


@lru_cache(maxsize=4096)
def wait_of(code: CodeType) -> _Wait | None:
    """Return what a call of this function waits for; `None` if it does not wait, or if that is not known."""
    path, name = code.co_filename.replace(os.sep, "/"), code.co_name
    if path.endswith(("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")):
        return None if name.startswith("_") else _Wait(2, f"in `{name}`")
    if path.endswith("torch/distributed/utils.py") and name in OF_DDP:
        return _Wait(2, OF_DDP[name])
    if "/fsdp/_fully_shard/" in path and name in _FSDP:
        return _Wait(3, _FSDP[name])
    if path.endswith("lightning_paral/engines/zero/runtime/gloo.py"):
        return _Wait(1, f"in `{name}`")
    if "/deepspeed/runtime/zero/" in path and name in _ZERO_3:
        return _Wait(1, "in the all-gather of ZeRO-3 parameters")
    if path.endswith("lightning_paral/distributed/store_exchange.py"):
        return _Wait(1, "in an exchange between all ranks")
    if path.endswith("lightning_paral/checkpoint/async_save.py"):
        return _Wait(1, "for a background save")
    if path.endswith("torch/autograd/graph.py") and name == BACKWARD:
        return _Wait(0, "in the backward pass")
    if path.endswith("torch/utils/data/dataloader.py") and name == "__next__":
        return _Wait(0, "for a batch of its loader", for_ranks=False)
    return None


_FSDP = {
    "unshard": "in the all-gather of an FSDP unit",
    "wait_for_unshard": "in the all-gather of an FSDP unit",
    "post_backward": "in the reduce-scatter of an FSDP unit",
}
_LIGHTNING = ("lightning", "pytorch_lightning")
_ZERO_3 = ("fetch_sub_module", "all_gather", "all_gather_coalesced", "wait")


def _with_name(wait: _Wait, frame: FrameType) -> _Wait:
    """Return `wait` with the name of the FSDP unit, if the frame knows it."""
    if wait.rank == 3:
        unit = unit_name(frame.f_locals.get("self"))
        if unit is not None:
            name = f"FSDP unit `{unit}`" if unit else "the root FSDP unit"
            return _Wait(wait.rank, wait.what.replace("an FSDP unit", name))
    return wait


def _where(frames: Sequence[FrameType], own: int) -> str:
    """Return the innermost function of the user, and the hook that called it; `own` is the index of its frame."""
    hook = next((index for index, each in enumerate(frames) if _hook_of(each)), None)
    called_at = f"called at {_line_of(frames[own])}" if own < len(frames) else ""
    if hook is not None and hook < own:
        return f"Lightning's `{_hook_of(frames[hook])}`{f', {called_at}' * bool(called_at)}"
    if own == len(frames):
        return f"`{frames[0].f_code.co_name}` of {library_of(frames[0].f_code.co_filename)}"
    where = _name_of(frames[own])
    if hook is None:
        return where
    entered = max(
        (index for index in range(own, hook) if not library_of(frames[index].f_code.co_filename)), default=own
    )
    return where if entered == own else f"{where}, called by {_name_of(frames[entered])}"


def _hook_of(frame: FrameType) -> str:
    """Return the name of the hook that this frame of Lightning calls; empty if it calls none."""
    code = frame.f_code
    if "hook_name" not in code.co_varnames[: code.co_argcount] or library_of(code.co_filename) not in _LIGHTNING:
        return ""
    return str(frame.f_locals.get("hook_name", ""))


def _name_of(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return _line_of(frame) if name == "<module>" else f"`{name}` ({_line_of(frame)})"


def _line_of(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
