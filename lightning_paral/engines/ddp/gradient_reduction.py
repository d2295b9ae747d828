"""Choose what averages gradients under DDP: its own reducer, one of our all-reduces, or the user's hook."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.comm import ALL_REDUCE, AllReduce, WireDtype
from lightning_paral.comm.ddp_hook import BucketReducer
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.comm.ring import all_reduce_by_size
from lightning_paral.engines.ddp.options import AllReduceName


class GradientReduction:
    """The gradient reduction that the options of `ParalDDPStrategy` choose. Call `register` for every DDP of a run.

    Args:
        all_reduce, wire_dtype: options of `ParalDDPStrategy`.
        hook, state, wrapper: the options `ddp_comm_hook`, `ddp_comm_state` and `ddp_comm_wrapper`.
    """

    def __init__(
        self,
        all_reduce: AllReduceName,
        wire_dtype: WireDtype | None,
        *,
        hook: Callable[..., Any] | None,
        state: object | None,
        wrapper: Callable[..., Any] | None,
    ) -> None:
        self.all_reduce = all_reduce
        """The option `all_reduce`."""
        self.wire_dtype = WIRE_DTYPES[wire_dtype] if wire_dtype else None
        """The dtype in which gradients travel; `None`: their own."""
        self._hook, self._state, self._wrapper = hook, state, wrapper
        self._reducer: BucketReducer | None = None

    def register(self, model: DistributedDataParallel, device: torch.device) -> None:
        """Make `model` use this reduction for its gradients, which are on `device`."""
        if self._hook is not None and device.type != "cuda":
            # Lightning registers hooks on CUDA only; DDP accepts them on every backend.
            hook = self._hook if self._wrapper is None else self._wrapper(self._hook)
            model.register_comm_hook(self._state, hook)
        all_reduce = self._choose_all_reduce(device)
        if all_reduce is not None and self._reducer is None:
            self._reducer = BucketReducer(all_reduce, model.process_group, device, self.wire_dtype)
        if self._reducer is not None:
            self._reducer.register(model)

    def _choose_all_reduce(self, device: torch.device) -> AllReduce | None:
        """Return the function that averages gradients; `None` if DDP's own reducer or the hook does."""
        name = self.all_reduce
        if name == "auto" and self.wire_dtype is not None and device.type == "cpu":
            return all_reduce_by_size
        if name == "auto":
            name = "native"
        if name == "native" and self.wire_dtype is None:
            return None
        return ALL_REDUCE[name]

    def shutdown(self) -> None:
        """Release the threads and streams. Call it at the end of a run."""
        if self._reducer is not None:
            self._reducer.shutdown()
            self._reducer = None
