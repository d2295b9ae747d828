"""`ParalFSDPStrategy` refuses invalid input with an error that says what to do instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn

from lightning_paral import ActivationCheckpointing, ConfigurationError, ParalFSDPStrategy
from tests.models.blocks import Contrastive, Tied
from tests.models.tokens import token_loader
from tests.running import quiet_trainer


class MadeEarly(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)  # which creates its states at once

    def configure_optimizers(self) -> Any:
        return self.optimizer


class CallsFunctionally(Tied):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        halved = {name: parameter.detach() * 0.5 for name, parameter in self.named_parameters()}
        torch.func.functional_call(self, halved, batch[0])


class LosesGradients(Tied):
    """A manual step whose loss depends on what a hook keeps, and not on what a module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embedding.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.kept = output
        return output.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0])
        self.manual_backward(self.kept.mean())


class ClipsInHook(Tied):
    """Registers a hook in a step on a parameter: an unsharded one, one that is never sharded, or one from before."""

    def __init__(self, method: str, which: str) -> None:
        super().__init__()
        self.method = method
        self.factor = nn.Parameter(torch.ones(()))
        self.choose = {
            "unsharded": lambda: self.embedding.weight,
            "replicated": lambda: self.factor,
            "replaced": partial(list(self.parameters()).__getitem__, 0),
        }[which]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        getattr(self.choose(), self.method)(lambda gradient: None)
        return super().training_step(batch, batch_idx) * self.factor


class Writes(Tied):
    """Changes a weight in a test step."""

    def __init__(self, batch_idx: int) -> None:
        super().__init__()
        self.batch_idx = batch_idx

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            self.embedding.weight.mul_(0.5)
        self(batch[0])


class RunsOwnExpert(Tied):
    """Each rank runs an expert of its own, as large as that of the other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.experts[self.global_rank](torch.ones(64)).mean()


class TwoDtypes(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm.bfloat16()


class Normalised(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class Eight(Precision):
    precision = "8-true"


def is_expert(name: str, module: nn.Module) -> bool:
    return name.startswith("experts.")


def never(name: str, module: nn.Module) -> bool:
    return False


def fit(model: Callable[[], Tied], options: dict[str, Any], trainer_options: dict[str, Any]) -> str:
    try:
        trainer = quiet_trainer(devices=2, max_epochs=1, strategy=ParalFSDPStrategy(**options), **trainer_options)
        trainer.fit(model(), token_loader(1, 2))
    except ConfigurationError as error:
        return str(error)
    return "trained"


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str]]] = {
    "unknown class": (Tied, {"units": ["Blok"]}, {}, ["'Blok'", "Block, Embedding, LayerNorm, Linear"]),
    "another class": (Tied, {"units": nn.Conv2d}, {}, ["'Conv2d'", "Block, Embedding"]),
    "predicate": (Tied, {"units": never}, {}, ["never", "chooses none of the", "embedding, blocks, blocks.0"]),
    "a list of modules": (Tied, {"units": nn.ModuleList}, {}, ["ModuleList", "Choose the modules in it"]),
    "replicas": (Tied, {"replicate": 3}, {}, ["replicate=3", "does not divide the 2 ranks", "1, 2"]),
    "no replicas": (Tied, {"replicate": 0}, {}, ["replicate=0", "1, 2"]),
    "accumulate": (Tied, {"accumulate": "whole"}, {}, ["'whole'", "'sharded' or 'unsharded'"]),
    "prefetch": (Tied, {"prefetch": 2}, {}, ["no option 'prefetch'", "set_modules_to_forward_prefetch"]),
    "resharding": (Tied, {"reshard_after_forward": 2}, {}, ["True or False or None", "replicate="]),
    "a loss of what a hook keeps": (LosesGradients, {}, {}, ["left gradients", "embedding.weight", "Return it"]),
    "an expert of each rank": (RunsOwnExpert, {"units": is_expert}, {}, ["different units", "0 * its output"]),
    "an expert of each rank in one unit": (RunsOwnExpert, {"units": ["Block"]}, {}, ["different units", "paral_ddp"]),
    "reduce_dtype": (Tied, {"reduce_dtype": "fp8"}, {}, ["'fp8'", "'bf16'"]),
    "early optimizer": (MadeEarly, {}, {}, ["Adagrad", "before MadeEarly was sharded", "configure_optimizers"]),
    "functional_call in a hook": (
        CallsFunctionally,
        {},
        {},
        ["was replaced or deleted while it is sharded", "in a step"],
    ),
    "a hook in a step": (
        partial(ClipsInHook, "register_hook", "unsharded"),
        {"units": ["Block"]},
        {},
        ["register_hook was called on embedding.weight", "on_after_backward"],
    ),
    "a hook on a scalar": (
        partial(ClipsInHook, "register_post_accumulate_grad_hook", "replicated"),
        {},
        {},
        ["register_post_accumulate_grad_hook was called on factor"],
    ),
    "a hook on a parameter from before": (
        partial(ClipsInHook, "register_hook", "replaced"),
        {},
        {},
        ["register_hook was called on", "on_after_backward"],
    ),
    "two dtypes": (TwoDtypes, {}, {}, ["blocks.1", "blocks.1.norm.weight (bfloat16)", "(float32)"]),
    "SyncBatchNorm": (Normalised, {}, {"sync_batchnorm": True}, ["sync_batchnorm", "CUDA"]),
    "own precision": (Tied, {}, {"plugins": [Eight()]}, ["Eight (precision='8-true')", "64-true, bf16-mixed"]),
    "fp16 on CPU": (Tied, {}, {"plugins": [MixedPrecision("16-mixed", "cpu")]}, ["needs CUDA", "bf16-mixed"]),
    "no blocks": (
        Contrastive,
        {"activation_checkpointing": ActivationCheckpointing()},
        {},
        ["no repeated blocks in Contrastive", "units=["],
    ),
    "blocks in blocks": (
        Tied,
        {"activation_checkpointing": ActivationCheckpointing(units=["Block", "Linear"])},
        {},
        ["'blocks.0'", "'blocks.0.up'", "three times"],
    ),
}


def refusals() -> dict[str, str]:
    return {label: fit(*case[:3]) for label, case in REFUSED.items()}


def test_invalid_options_are_named_with_the_remedy(on_ranks) -> None:
    for messages in on_ranks(2, refusals):
        for label, message in messages.items():
            for part in REFUSED[label][3]:
                assert part in message, (label, part, message)


def evaluate(batch_idx: int, reshard_after_forward: bool | None) -> str:
    strategy = ParalFSDPStrategy(reshard_after_forward=reshard_after_forward)
    try:
        trainer = quiet_trainer(devices=2, strategy=strategy, precision="bf16-mixed")
        trainer.test(Writes(batch_idx), token_loader(4, 2), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return "evaluated"


@pytest.mark.parametrize(("batch_idx", "reshard_after_forward"), [(0, None), (3, False)])
def test_writes_of_evaluation_steps_that_would_be_lost_are_refused(on_ranks, batch_idx, reshard_after_forward) -> None:
    for message in on_ranks(2, evaluate, batch_idx, reshard_after_forward):
        assert "was changed while it was unsharded" in message
        assert "embedding.weight" in message
