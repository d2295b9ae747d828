"""The checks of the GPU tests on each rank: `python -m tests.gpu.checks CHECK FOLDER [ARGUMENTS]` under torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_paral import ActivationCheckpointing, ParalDDPStrategy, ParalFSDPStrategy
from tests.gpu.reductions import reduction_error
from tests.gpu.rounding import with_sgd
from tests.models.blocks import GAN, MODULES, OnTheModule, Tied
from tests.models.regression import Regression, fit_regression, regression_data
from tests.models.tokens import fit
from tests.running import quiet_trainer

WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def parity(algorithm: str) -> float:
    """Return the largest difference of the weights after 20 steps from the same training in one process on CPU."""
    options = {"accelerator": "gpu", "strategy": ParalDDPStrategy(all_reduce=algorithm)}
    _, weights = fit_regression(20, 3, WORLD_SIZE, **options)
    _, expected = _in_one_process()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


def zero_parity(label: str) -> float:
    """Return the largest difference of the weights after 20 steps under ZeRO from one process on CPU."""
    from tests.contract.cases import BY_LABEL

    _, weights = fit_regression(20, 3, WORLD_SIZE, accelerator="gpu", strategy=BY_LABEL[label].strategy())
    _, expected = _in_one_process()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


def zero_losses(strategy: str, precision: str) -> list[float]:
    """Return this rank's losses over 20 steps."""
    losses, _ = fit_regression(20, 1, WORLD_SIZE, accelerator="gpu", strategy=strategy, precision=precision)
    return losses


def zero_windows(stage: str, overlap: str) -> float:
    """Return the largest difference of the weights from one process on CPU, over all kinds of windows."""
    from tests.distributed.zero.test_overlap import fit_all

    overlap_comm = {"True": True, "False": False, "None": None}[overlap]
    on_gpu = fit_all(WORLD_SIZE, "gpu", stage=int(stage), overlap_comm=overlap_comm, reduce_bucket_numel=200)
    _become_one_process()
    return _largest_difference(on_gpu, fit_all(1, "cpu"))


def zero_clipped_on_host(strategy: str) -> float:
    """Return the largest difference of the weights from one process on CPU, with clipping by value on the host."""
    from tests.distributed.zero.test_late_copies import WideClipped, fit

    on_gpu = [fit(WORLD_SIZE, strategy, by_hand, WideClipped, "gpu")[0] for by_hand in (False, True)]
    _become_one_process()
    return _largest_difference(on_gpu, [fit(1, "auto", by_hand, WideClipped)[0] for by_hand in (False, True)])


def zero_on_nvme_without_toolkit(label: str, folder: str) -> float:
    """Return `zero_parity` without a CUDA toolkit, with operators that are compiled again, into `folder`."""
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    cpp_extension.CUDA_HOME = None
    return zero_parity(label)


def _largest_difference(fits: list[object], expected: list[object]) -> float:
    pairs = [(ours[1], theirs[1]) for ours, theirs in zip(fits, expected, strict=True)]
    return max((ours[name].cpu() - theirs[name]).abs().max().item() for ours, theirs in pairs for name in theirs)


def fsdp_parity(name: str) -> float:
    """Return the largest difference of a module's weights after 5 steps on the GPUs from one process on CPU."""
    clipping = {} if MODULES[name] is GAN else {"gradient_clip_val": 0.5}
    strategy = ParalFSDPStrategy(offload=name == "Tied")
    make = with_sgd(MODULES[name])
    _, weights = fit(make, 5, WORLD_SIZE, accelerator="gpu", strategy=strategy, **clipping)
    _become_one_process()
    _, expected = fit(make, 5, 1, **clipping)
    return max((weights[key].cpu() - expected[key]).abs().max().item() for key in expected)


def fsdp_precision(precision: str) -> tuple[list[float], list[float]]:
    """Return the losses under FSDP and DDP."""
    options = {"accelerator": "gpu", "precision": precision, "gradient_clip_val": 0.5}
    make = with_sgd(OnTheModule)
    return tuple(fit(make, 8, WORLD_SIZE, strategy=strategy, **options)[0] for strategy in ("paral_fsdp", "paral_ddp"))


def fsdp_checkpointing() -> float:
    """Return the largest difference of the weights with activation checkpointing and offload from those without."""
    fits = [
        fit(Tied, 5, WORLD_SIZE, accelerator="gpu", strategy=ParalFSDPStrategy(activation_checkpointing=options))[1]
        for options in (None, ActivationCheckpointing(offload_to_cpu=True))
    ]
    return max((fits[0][key] - fits[1][key]).abs().max().item() for key in fits[0])


def _in_one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    _become_one_process()
    return fit_regression(20, 3, 1, strategy="auto")


def _become_one_process() -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")] + ["RANK", "LOCAL_RANK", "WORLD_SIZE"]:
        os.environ.pop(name, None)


class InGroup(Callback):
    """Calls a function while the process group of a fit exists."""

    def __init__(self, function: object) -> None:
        self.function = function

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.result = self.function(trainer, pl_module.device)


def _in_group(function: object) -> object:
    callback = InGroup(function)
    trainer = quiet_trainer(
        accelerator="gpu", devices=WORLD_SIZE, strategy="paral_ddp", max_steps=1, callbacks=[callback]
    )
    trainer.fit(Regression(), regression_data(1, WORLD_SIZE))
    return callback.result


def all_reduce(algorithm: str) -> object:
    """Return the largest error against a float64 sum over several lengths, and whether all ranks have the same bits."""

    return _in_group(lambda trainer, device: reduction_error(algorithm, device))


def cpu_path() -> object:
    """Return the mean of the ranks as a CPU tensor, and the ranks gathered as objects."""

    def check(trainer: Trainer, device: torch.device) -> tuple[float, list[int]]:
        gathered: list[int] = [0] * WORLD_SIZE
        dist.all_gather_object(gathered, dist.get_rank())
        return trainer.strategy.reduce(torch.tensor(float(dist.get_rank()))).item(), gathered

    return _in_group(check)


if __name__ == "__main__":
    check, folder, *arguments = sys.argv[1:]
    rank = os.environ["RANK"]
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(globals()[check](*arguments)))
