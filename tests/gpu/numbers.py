"""Check that a strategy on one rank trains as a hand-written loop on the same device does."""

from typing import Any

import torch

from lightning_paral.errors import ConfigurationError
from tests.contract.cases import BY_LABEL
from tests.gpu import raw_loops
from tests.gpu.place import (
    largest_difference,
    mean_over_replicas,
    needs_operators,
    options_of,
    trainer_options,
)
from tests.gpu.rounding import with_sgd
from tests.models.blocks import GAN, MODULES
from tests.models.regression import Regression, fit_regression, regression_data
from tests.models.tokens import fit
from tests.running import quiet_trainer

NUM_STEPS = 20
PRECISIONS = ("64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
_LOSS_TOLERANCES = {"64-true": 1e-9, "bf16-mixed": 1e-2, "16-mixed": 1e-2, "bf16-true": 5e-2, "16-true": 5e-2}
"""Relative."""


def parity(label: str, device: str) -> dict[str, Any]:
    """Train 20 steps, without accumulation, and with accumulation and a partial window at the end."""
    facts: dict[str, Any] = {"failures": []}
    tolerance = BY_LABEL[label].tolerance
    for accumulate in (1, 3):
        losses, weights = fit_regression(NUM_STEPS, accumulate, 1, **options_of(label, device))
        expected_losses, expected = raw_loops.regression(NUM_STEPS, accumulate, device)
        off = _relative(mean_over_replicas(losses, label), expected_losses)
        _note(facts, f"weights, accumulate={accumulate}", largest_difference(weights, expected), tolerance)
        _note(facts, f"losses, accumulate={accumulate}", off, tolerance)
    return facts


def clipping(label: str, device: str) -> dict[str, Any]:
    """Clip by norm and by value, tightly enough to matter, with accumulation."""
    facts: dict[str, Any] = {"failures": []}
    tolerance = BY_LABEL[label].tolerance
    for algorithm, most in (("norm", 0.05), ("value", 0.002)):
        clip = {"gradient_clip_val": most, "gradient_clip_algorithm": algorithm}
        _, weights = fit_regression(10, 2, 1, **options_of(label, device), **clip)
        _, expected = raw_loops.regression(10, 2, device, clip=(algorithm, most))
        _, unclipped = raw_loops.regression(10, 2, device, clip=(algorithm, 1e6))
        if largest_difference(expected, unclipped) < 1e-3:
            facts["failures"].append(f"clipping by {algorithm} makes no difference here: the check shows nothing")
        _note(facts, algorithm, largest_difference(weights, expected), tolerance)
    return facts


def modules(label: str, device: str) -> dict[str, Any]:
    """Train modules that were not written for a strategy: tied, frozen, shared, 0-dimensional, GPT-2, T5, and so on."""
    facts: dict[str, Any] = {"failures": []}
    for name, module in MODULES.items():
        if module is GAN:  # manual optimization: has its own loop
            continue
        make = with_sgd(module)
        try:
            _, weights = fit(make, 5, 1, **options_of(label, device))
        except ConfigurationError as refusal:
            facts[name] = f"refused: {str(refusal)[:80]}"
            continue
        _, expected = raw_loops.tokens(make, 5, device)
        _note(facts, name, largest_difference(weights, expected), 1e-4)
    return facts


def precisions(label: str, device: str) -> dict[str, Any]:
    """Compare losses and weights in every precision with those of the loop in the same precision."""
    facts: dict[str, Any] = {"failures": []}
    make = Regression if needs_operators(label) else with_sgd(Regression)  # DeepSpeed offloads Adam only
    for precision in PRECISIONS:
        if device == "cpu" and precision.startswith("16"):
            continue
        try:
            losses, weights = _fit_in(precision, label, device, make)
        except (ConfigurationError, ValueError) as refusal:
            facts[precision] = f"refused: {str(refusal)[:80]}"
            # Offload may refuse with a reason; ZeRO has no 64-true.
            if "offload" not in label and ("zero" not in label or precision != "64-true"):
                facts["failures"].append(f"{precision} is refused: {refusal}")
            continue
        # ZeRO's "true" precisions keep fp32 masters, and its fp16 engine searches for a loss scale in the first steps.
        masters = "zero" in label and precision.endswith("-true")
        reference = precision.replace("-true", "-mixed") if masters else precision
        expected_losses, expected = raw_loops.regression(NUM_STEPS, 1, device, make=make, precision=reference)
        off = _relative(losses, expected_losses)
        facts[f"weights in {precision}"] = largest_difference(weights, expected)
        if precision == "16-true" and masters:
            facts["losses in 16-true"] = off
            if not torch.tensor(losses).isfinite().all() or losses[-1] >= losses[0]:
                facts["failures"].append(f"losses in 16-true do not fall: {losses[0]} to {losses[-1]}")
        else:
            _note(facts, f"losses in {precision}", off, _LOSS_TOLERANCES[precision])
    if not any(name.startswith("losses") for name in facts):
        facts["failures"].append("every precision was refused")
    return facts


def _fit_in(precision: str, label: str, device: str, make: type[Regression]) -> raw_loops.Fit:
    torch.manual_seed(3)
    model = make()
    options = {"max_epochs": 1, "gradient_clip_val": 0.1} | options_of(label, device)
    trainer = quiet_trainer(precision=precision, **options)
    trainer.fit(model, regression_data(NUM_STEPS, 1))
    weights = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
    return mean_over_replicas(model.losses, label), weights


def named_backend(device: str) -> dict[str, Any]:
    """Fit with a process group that carries one kind of tensors only: "nccl" on CUDA, "gloo" on CPU."""
    from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy

    backend = "nccl" if device == "cuda" else "gloo"
    facts: dict[str, Any] = {"failures": []}
    made = {
        "ddp": ParalDDPStrategy(process_group_backend=backend),
        "fsdp": ParalFSDPStrategy(process_group_backend=backend),
        "fsdp, offload": ParalFSDPStrategy(process_group_backend=backend, offload=True),
    }
    for name, strategy in made.items():
        try:
            _, weights = fit_regression(5, 1, 1, **trainer_options(device), strategy=strategy)
        except Exception as error:
            facts["failures"].append(f"{name} with process_group_backend={backend!r}: {type(error).__name__}: {error}")
            continue
        _, expected = raw_loops.regression(5, 1, device)
        _note(facts, name, largest_difference(weights, expected), 1e-5)
    return facts


def _note(facts: dict[str, Any], name: str, off: float, tolerance: float) -> None:
    facts[name] = off
    if not off <= tolerance:
        facts["failures"].append(f"{name}: off by {off:.3g}, more than {tolerance:g}")


def _relative(found: list[float], expected: list[float]) -> float:
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} losses, not {len(expected)}")
    both = torch.tensor([found, expected], dtype=torch.float64)
    worst = ((both[0] - both[1]).abs() / both[1].abs()).max().item()
    return worst if worst == worst else float("inf")
