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
from tests.gpu.place import largest_difference, options_of, synchronize, trainer_options
from tests.models.regression import Regression
from tests.running import quiet_trainer

_ALLOWED_BYTES = 2**20
"""GPU memory that may stay allocated after a run, because libraries keep it after first use."""


class Layer(nn.Module):
    """A unit: a residual feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(Regression):
    """Equal layers, so large that memory kept after a run is tens of megabytes."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(num_layers)))
        self.hidden, self.out = nn.Identity(), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.first(x)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _sizes(device: str) -> tuple[int, int, int]:
    """Return width, number of layers, and batch size."""
    return (512, 12, 8192) if device == "cuda" else (16, 3, 8)


def _batches(size: int, num: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num * size, 8, generator=generator)
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


def left_behind(label: str, device: str) -> dict[str, Any]:
    """Fit twice: the first fit shows memory that is kept once, the second memory that each fit keeps."""
    width, num_layers, batch_size = _sizes(device)
    facts: dict[str, Any] = {"failures": []}
    before = allocated(device)
    free_before = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    after = []
    for number in range(2):
        model = Deep(width, num_layers)
        quiet_trainer(max_epochs=1, **options_of(label, device)).fit(model, _batches(batch_size // 8))
        if number == 1:
            facts["MB while the module is alive"] = round((allocated(device) - after[0]) / 1e6, 3)
        del model
        after.append(allocated(device))
    facts["MB after the first run"] = round((after[0] - before) / 1e6, 3)
    facts["MB more after the second"] = round((after[1] - after[0]) / 1e6, 3)
    if device == "cuda":
        facts["MB of the GPU taken, libraries' included"] = round((free_before - torch.cuda.mem_get_info()[0]) / 1e6)
        facts["MB at the peak"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    if after[1] - after[0] > _ALLOWED_BYTES:
        facts["failures"].append(f"each run leaves {(after[1] - after[0]) / 1e6:.1f} MB behind")
    if after[0] - before > 32 * _ALLOWED_BYTES:
        facts["failures"].append(f"the first run leaves {(after[0] - before) / 1e6:.1f} MB behind")
    return facts


class PeakOfSteps(Callback):
    """Return the peak memory from the second step on, beyond the memory allocated before it."""

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


def activation_offload(device: str) -> dict[str, Any]:
    """Recomputation, also with unit inputs on the host, gives the same weights with less memory."""
    width, num_layers, batch_size = _sizes(device)
    facts: dict[str, Any] = {"failures": []}
    ways = {
        "kept": None,
        "recomputed": ActivationCheckpointing(units=["Layer"]),
        "on the host": ActivationCheckpointing(units=["Layer"], offload_to_cpu=True),
    }
    for strategy in (ParalDDPStrategy, ParalFSDPStrategy):
        peaks, weights = {}, {}
        for name, options in ways.items():
            torch.manual_seed(4)
            model, peak = Deep(width, num_layers), PeakOfSteps()
            trainer = quiet_trainer(
                max_epochs=1,
                callbacks=[peak],
                strategy=strategy(activation_checkpointing=options),
                **trainer_options(device),
            )
            trainer.fit(model, _batches(batch_size))
            peaks[name] = peak.peak_bytes
            weights[name] = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
            off = largest_difference(weights[name], weights["kept"])
            facts[f"{strategy.__name__}, {name}"] = f"{peaks[name] / 1e6:.1f} MB, weights off by {off:.2g}"
            if off > 1e-5:
                facts["failures"].append(f"{strategy.__name__}, {name}: weights off by {off:.3g}")
        if device == "cuda" and not peaks["on the host"] < peaks["recomputed"] < peaks["kept"]:
            facts["failures"].append(f"{strategy.__name__}: peaks do not fall: {peaks}")
    synchronize(device)
    return facts
