"""Check that a strategy, on one rank or on two, trains as a hand-written loop on the same device does."""

import os
from functools import partial
from typing import Any

import torch

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from lightning_paral.errors import ConfigurationError
from tests.contract.cases import BY_LABEL
from tests.gpu import raw_loops
from tests.gpu.place import (
    Facts,
    check_installed,
    largest_difference,
    mean_losses,
    num_ranks,
    options_of,
    relative_difference,
    trainer_options,
)
from tests.gpu.raw_loops import with_sgd
from tests.models.blocks import MODULES
from tests.models.chain import Chain, fit_chain
from tests.models.regression import Regression, fit_regression, regression_data
from tests.models.several_optimizers import Accumulating, Toggled
from tests.models.several_optimizers import fit as fit_several
from tests.models.split_layers import PLAN, SplitLayers
from tests.models.tokens import fit
from tests.running import quiet_trainer

NUM_STEPS = 20
LOSS_TOLERANCES = {"64-true": 1e-9, "bf16-mixed": 1e-2, "16-mixed": 1e-2, "bf16-true": 5e-2, "16-true": 5e-2}
"""Relative, by precision."""


def parity(label: str, device: str) -> Facts:
    """Train 20 steps, without accumulation, and with accumulation and a partial window at the end. *Collective*."""
    facts, tolerance = Facts(), BY_LABEL[label].tolerance
    for accumulate in (1, 3):
        losses, weights = fit_regression(NUM_STEPS, accumulate, num_ranks(), **options_of(label, device))
        expected_losses, expected = raw_loops.regression(NUM_STEPS, accumulate, device)
        off = relative_difference(mean_losses(losses, label), expected_losses)
        facts.close(f"weights, accumulate={accumulate}", largest_difference(weights, expected), tolerance)
        facts.close(f"losses, accumulate={accumulate}", off, tolerance)
    return facts


def clipping(label: str, device: str) -> Facts:
    """Clip by norm and by value, tightly enough to matter, with accumulation."""
    facts = Facts()
    algorithms = {"norm": 0.05} | ({} if "zero" in label else {"value": 0.002})  # DeepSpeed does not clip by value
    for algorithm, most in algorithms.items():
        clip = {"gradient_clip_val": most, "gradient_clip_algorithm": algorithm}
        _, weights = fit_regression(10, 2, 1, **options_of(label, device), **clip)
        _, expected = raw_loops.regression(10, 2, device, clip=(algorithm, most))
        _, unclipped = raw_loops.regression(10, 2, device, clip=(algorithm, 1e6))
        matters = largest_difference(expected, unclipped) >= 1e-3
        facts.require(matters, f"clipping by {algorithm} makes no difference here: the check shows nothing")
        facts.close(algorithm, largest_difference(weights, expected), BY_LABEL[label].tolerance)
    return facts


def modules(label: str, device: str) -> Facts:
    """Train modules not written for a strategy: tied, frozen, shared, 0-dimensional, GPT-2, T5, etc. *Collective*."""
    facts = Facts()
    for name, module in MODULES.items():
        make = with_sgd(module)
        try:
            _, weights = fit(make, 5, num_ranks(), **options_of(label, device))
        except ConfigurationError as refusal:
            facts[name] = f"refused: {str(refusal)[:80]}"
            continue
        _, expected = raw_loops.tokens(make, 5, device)
        facts.close(name, largest_difference(weights, expected), 1e-4)
    return facts


def manual_optimization(device: str) -> Facts:
    """Optimize manually, and compare with Lightning's strategy on one rank, with `paral_ddp` on two. *Collective*."""
    facts = Facts()
    made: dict[str, tuple[Any, Any]] = {"fsdp": (Toggled, ParalFSDPStrategy)}
    for stage, overlap in ((1, False), (2, True), (3, True)):
        zero = partial(ParalZeROStrategy, stage=stage, overlap_comm=overlap)
        made[f"zero{stage}, overlap_comm={overlap}"] = (Accumulating, zero)
    check_installed("paral_zero")
    options = trainer_options(device)
    expected = {}
    for module in (Toggled, Accumulating):
        # The discriminator of the GAN has parameters that no optimizer has.
        reference = ParalDDPStrategy(find_unused_parameters=True) if num_ranks() > 1 else "auto"
        _, expected[module] = fit_several(module(), num_ranks(), **options | {"strategy": reference})
    for name, (module, strategy) in made.items():
        _, weights = fit_several(module(), num_ranks(), **options | {"strategy": strategy()})
        facts.close(name, largest_difference(weights, expected[module]), 1e-4)
    return facts


def precisions(label: str, device: str) -> Facts:
    """Compare losses and weights in every precision with those of the loop in the same precision."""
    facts = Facts()
    make = with_sgd(Regression)
    for precision, tolerance in LOSS_TOLERANCES.items():
        if device == "cpu" and precision.startswith("16"):
            continue
        try:
            losses, weights = _fit_in(precision, label, device, make)
        except (ConfigurationError, ValueError) as refusal:
            facts[precision] = f"refused: {str(refusal)[:80]}"
            # Offload may refuse with a reason; ZeRO has no 64-true.
            may_refuse = "offload" in label or ("zero" in label and precision == "64-true")
            facts.require(may_refuse, f"{precision} is refused: {refusal}")
            continue
        # ZeRO's "true" precisions keep fp32 masters, and its fp16 engine searches for a loss scale in the first steps.
        masters = "zero" in label and precision.endswith("-true")
        reference = precision.replace("-true", "-mixed") if masters else precision
        expected_losses, expected = raw_loops.regression(NUM_STEPS, 1, device, make=make, precision=reference)
        off = relative_difference(losses, expected_losses)
        facts[f"weights in {precision}"] = largest_difference(weights, expected)
        if precision == "16-true" and masters:
            falls = torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]
            facts["losses in 16-true"] = off
            facts.require(bool(falls), f"losses in 16-true do not fall: {losses[0]} to {losses[-1]}")
        else:
            facts.close(f"losses in {precision}", off, tolerance)
    facts.require(any(name.startswith("losses") for name in facts), "every precision was refused")
    return facts


def _fit_in(precision: str, label: str, device: str, make: type[Regression]) -> raw_loops.Fit:
    torch.manual_seed(3)
    model = make()
    options = {"max_epochs": 1, "gradient_clip_val": 0.1} | options_of(label, device)
    trainer = quiet_trainer(precision=precision, **options)
    trainer.fit(model, regression_data(NUM_STEPS, 1))
    weights = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
    return mean_losses(model.losses, label), weights


def named_backend(device: str) -> Facts:
    """Fit with a process group that carries one kind of tensors only: "nccl" on CUDA, "gloo" on CPU."""
    backend, facts = "nccl" if device == "cuda" else "gloo", Facts()
    made = {
        "ddp": ParalDDPStrategy(process_group_backend=backend),
        "fsdp": ParalFSDPStrategy(process_group_backend=backend),
        "fsdp, offload": ParalFSDPStrategy(process_group_backend=backend, offload=True),
    }
    _, expected = raw_loops.regression(5, 1, device)
    for name, strategy in made.items():
        _, weights = fit_regression(5, 1, 1, **trainer_options(device), strategy=strategy)
        facts.close(name, largest_difference(weights, expected), 1e-5)
    return facts


class FrozenStage(Chain):
    """A chain whose first stage has no gradients, which Lightning's clipping asks for on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


def model_parallel(name: str, device: str) -> Facts:
    """Train with split layers or stages, and compare with Lightning in one process. *Collective*."""
    facts = Facts()
    make = {"tensor": SplitLayers, "pipeline": Chain, "frozen_stage": FrozenStage}[name]
    options = {key: value for key, value in trainer_options(device).items() if key != "devices"}
    for accumulate in (1, 3):
        split: Any = ParalPipelineStrategy(micro_batches=2)
        if name == "tensor":
            split = ParalFSDPStrategy(tensor_parallel=num_ranks(), plan=PLAN)
        fits = []
        for strategy, where in (("auto", options | {"num_nodes": 1}), (split, options)):
            losses, module, _ = fit_chain(strategy, 1, module=make, accumulate_grad_batches=accumulate, **where)
            fits.append((list(losses.values()), {key: value.cpu() for key, value in module.state_dict().items()}))
        (expected_losses, expected), (losses, weights) = fits
        facts.close(f"weights, accumulate={accumulate}", largest_difference(weights, expected), 1e-5)
        facts.close(f"losses, accumulate={accumulate}", relative_difference(losses, expected_losses), 1e-5)
    return facts


def nvme_without_toolkit(device: str, folder: str) -> Facts:
    """Train with offload to NVMe without a CUDA toolkit, with operators that are compiled again, into `folder`."""
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    cpp_extension.CUDA_HOME = None
    return parity("paral_zero3_nvme", device)
