"""GPU memory that a run leaves allocated, and that activation offloading saves."""

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ActivationCheckpointing, ParalDDPStrategy, ParalFSDPStrategy
from tests.gpu.place import Facts, largest_difference, options_of, trainer_options
from tests.models.regression import Regression
from tests.running import quiet_trainer

_ALLOWED_BYTES = 2**20
"""GPU memory that may stay allocated after a run, because libraries keep it after first use."""
_SIZES = {"cuda": (512, 12, 8192), "cpu": (16, 3, 8)}
"""Width, number of layers, and batch size."""


class Layer(nn.Module):
    """A unit: a residual feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # the stream is behind, so that a copy that does not wait for it reads old values
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(Regression):
    """Equal layers, so large that memory kept after a run is tens of megabytes."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(8, width), *(Layer(width) for _ in range(num_layers)))
        self.out = nn.Linear(width, 2)


def _batches(size: int, num: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(num * size, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :2].contiguous()), size)


def allocated(device: str) -> int:
    """Return the bytes of tensors on the GPU or, without one, of all tensors that are alive."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        if dist.is_initialized():  # until the next collective, torch keeps what the last ones reduced
            time.sleep(0.3)
            dist.all_reduce(torch.zeros(1, device=device))
        torch._C._cuda_clearCublasWorkspaces()  # allocated per stream on first use; no public name frees them
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def left_behind(label: str, device: str) -> Facts:
    """Fit twice: the first fit shows memory that is kept once, the second memory that each fit keeps."""
    facts, after = Facts(), []
    width, num_layers, batch_size = _SIZES[device]
    before = allocated(device)
    for _ in range(2):
        model = Deep(width, num_layers)
        quiet_trainer(max_epochs=1, **options_of(label, device)).fit(model, _batches(batch_size // 8))
        del model
        after.append(allocated(device))
    once, each = after[0] - before, after[1] - after[0]
    facts |= {"MB after the first run": round(once / 1e6, 3), "MB more after the second": round(each / 1e6, 3)}
    facts.require(each <= _ALLOWED_BYTES, f"each run leaves {each / 1e6:.1f} MB behind")
    facts.require(once <= 32 * _ALLOWED_BYTES, f"the first run leaves {once / 1e6:.1f} MB behind")
    return facts


class PeakOfSteps(Callback):
    """Measures the peak memory from the second step on, beyond the memory allocated before it."""

    peak_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and pl_module.device.type == "cuda":
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._before


def activation_offload(device: str) -> Facts:
    """Recomputation, also with unit inputs on the host, gives the same weights with less memory."""
    facts = Facts()
    width, num_layers, batch_size = _SIZES[device]
    ways = {
        "kept": None,
        "recomputed": ActivationCheckpointing(units=["Layer"]),
        "on the host": ActivationCheckpointing(units=["Layer"], offload_to_cpu=True),
    }
    for strategy in (ParalDDPStrategy, ParalFSDPStrategy):
        peaks, weights = {}, {}
        for name, checkpointing in ways.items():
            torch.manual_seed(4)
            model, peak = Deep(width, num_layers), PeakOfSteps()
            options = trainer_options(device) | {"strategy": strategy(activation_checkpointing=checkpointing)}
            quiet_trainer(max_epochs=1, callbacks=[peak], **options).fit(model, _batches(batch_size))
            peaks[name] = peak.peak_bytes
            weights[name] = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
            case = f"{strategy.__name__}, {name}"
            facts[f"MB, {case}"] = peaks[name] / 1e6
            facts.close(f"weights, {case}", largest_difference(weights[name], weights["kept"]), 1e-5)
        falls = peaks["on the host"] < peaks["recomputed"] < peaks["kept"]
        facts.require(falls or device == "cpu", f"{strategy.__name__}: peaks do not fall: {peaks}")
    return facts
