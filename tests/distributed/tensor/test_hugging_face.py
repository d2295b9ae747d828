"""Models of Hugging Face, and the example's GPT, train with split layers as in one process, tied and untied."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from examples.gpt import GPT
from lightning_paral import ParalFSDPStrategy
from tests.distributed.pipeline.test_hugging_face import LENGTH, Fitted, LanguageModel, fit_language_model


class ExampleGPT(GPT):
    """The example's GPT on the batches of the other models."""

    def __init__(self) -> None:
        super().__init__(width=64, num_layers=2, num_heads=4, context=LENGTH, num_warmup_steps=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss((batch[:, :-1], batch[:, 1:]))

    def on_train_batch_end(self, *args: Any) -> None:
        """Log nothing."""


class UsesAttentions(LanguageModel):
    """Its loss depends on the weights of the attentions, of which a rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__("llama", False)
        self.model.set_attn_implementation("eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.model(input_ids=batch, labels=batch, output_attentions=True)
        first, *_ = outputs.attentions
        assert first.shape == (len(batch), 4, LENGTH, LENGTH)
        return outputs.loss + first[..., 0].square().sum(1).mean()


class Held(Callback):
    """Counts the elements of split parameters, and those of them that this rank holds."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        split = [p for p in pl_module.parameters() if not p.placements[-1].is_replicate()]  # type: ignore[attr-defined]
        self.full = sum(parameter.numel() for parameter in split)
        self.local = sum(parameter.to_local().numel() for parameter in split)  # type: ignore[attr-defined]


def make(kind: str, tied: bool) -> LightningModule:
    own = {"gpt": ExampleGPT, "attentions": UsesAttentions}
    module = own[kind]() if kind in own else LanguageModel(kind, tied)
    return module.double()  # in fp32, AdamW turns the rounding of gradients that are zero into steps


@cache
def in_one_process(kind: str, tied: bool) -> Fitted:
    return fit_language_model(1, partial(make, kind, tied), "auto")


def split(world_size: int, kind: str, tied: bool, num_tensor_ranks: int) -> tuple[Any, int, int]:
    held = Held()
    strategy = ParalFSDPStrategy(tensor_parallel=num_tensor_ranks, sequence_parallel=tied, split="global")
    return fit_language_model(world_size, partial(make, kind, tied), strategy, held), held.full, held.local


@pytest.mark.parametrize(
    ("kind", "tied", "world_size", "num_tensor_ranks"),
    [
        *((kind, False, 2, 2) for kind in ("gpt", "llama", "attentions", "qwen3", "gpt2", "bert", "t5")),
        *((kind, True, 2, 2) for kind in ("llama", "qwen3", "gpt2", "bert", "t5")),
        *((kind, True, 4, 2) for kind in ("llama", "qwen3", "t5")),
        *((kind, False, 4, 4) for kind in ("gpt", "gpt2", "bert", "llama")),
    ],
)
def test_language_model_equals_one_process(
    on_ranks, kind: str, tied: bool, world_size: int, num_tensor_ranks: int
) -> None:
    losses, weights = in_one_process(kind, tied)

    ranks = on_ranks(world_size, split, world_size, kind, tied, num_tensor_ranks)

    mean = torch.tensor([found for (found, _), _, _ in ranks]).mean(dim=0).tolist()
    assert mean == pytest.approx(losses, rel=1e-6)
    for (_, found), full, local in ranks:
        assert found.keys() == weights.keys()
        assert full > 0.8 * sum(weight.numel() for weight in weights.values() if weight.dim() > 1)
        assert local * world_size == full  # every split parameter, exactly
        for name, weight in found.items():
            # T5 computes its norms in fp32, and AdamW turns their rounding into steps.
            limit = 1e-4 if kind == "t5" and tied else 1e-5
            assert (weight - weights[name]).abs().max() <= limit, name
