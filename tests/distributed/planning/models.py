"""Modules whose memory is planned and measured, and their data."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from tests.unit.planning.models import ConvNet, Language, gpt


class Drawn(Dataset[Any]):
    """Samples of a batch, drawn again for each index."""

    def __init__(self, draw: Callable[[torch.Generator], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        return self._draw(torch.Generator().manual_seed(index))


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 256, (65,), generator=generator)
    return drawn[:-1], drawn[1:]


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (64,), generator=generator)


def _image(generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.randn(3, 32, 32, generator=generator), 0


def _llama() -> LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Language(LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)))


def _bert() -> LightningModule:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Language(BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=3, **sizes)))


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[torch.Generator], Any]]] = {
    "gpt": (lambda: gpt(192, 4), _text),
    "llama": (_llama, _tokens),
    "bert": (_bert, _tokens),
    "conv": (lambda: ConvNet(64), _image),
}
"""By name: a function that makes the module, and one that draws a sample."""
