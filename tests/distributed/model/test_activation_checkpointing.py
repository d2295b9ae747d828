"""Activation checkpointing gives the same gradients under every strategy, and recomputes each block once."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from lightning_paral import ActivationCheckpointing, ConfigurationError
from lightning_paral.model.activation_checkpointing import checkpoint_units
from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.models.blocks import Tied
from tests.models.tokens import fit
from tests.running import assert_same_fit

NUM_BATCHES = 4
ONE_UNIT = "paral_fsdp, one unit"
LABELS = (*labels(case for case in with_ranks(MAIN, 2) if case.label != "paral_zero3"), ONE_UNIT, "zero3_partitioned")


class Deep(Tied):
    """Counts the forward passes of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        for block in self.blocks:
            block.down.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_forwards += 1


@cache
def fit_in_one_process() -> Any:
    return fit(Deep, NUM_BATCHES, 1, gradient_clip_val=0.5)


def fit_on_rank(label: str, offload_to_cpu: bool) -> Any:
    models = []

    def make() -> Deep:
        models.append(Deep())
        return models[0]

    options = ActivationCheckpointing(units=["Block"], offload_to_cpu=offload_to_cpu)
    units = {"units": ["Embedding"]} if label == ONE_UNIT else {}
    strategy = strategy_of(label.partition(",")[0], activation_checkpointing=options, **units)
    fitted = fit(make, NUM_BATCHES, 2, gradient_clip_val=0.5, strategy=strategy)
    assert "forward" not in vars(models[0].blocks[0])
    return fitted, models[0].num_forwards


@pytest.mark.parametrize("label", LABELS)
def test_training_equals_one_process_and_blocks_compute_twice(on_ranks, label: str) -> None:
    ranks = on_ranks(2, fit_on_rank, label, label == "paral_ddp")

    assert_same_fit([fitted for fitted, _ in ranks], fit_in_one_process())
    for _, num_forwards in ranks:
        assert num_forwards == 2 * 4 * NUM_BATCHES


class Statistics(torch.nn.Module):
    """Has buffers that its forward pass changes in place, replaces, and changes through `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(4))
        self.register_buffer("large", torch.zeros(2**20 + 1))
        self.register_buffer("expanded", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average = 0.9 * self.average + x.detach().mean(dim=0)
        self.largest.data.copy_(self.largest + x.detach().amax(dim=0))
        self.large[0] += 1
        return (self.norm(self.linear(x)) + self.average * x).relu() * (1 + self.calls) + self.largest * x


def test_caches_of_hugging_face_models_do_not_grow_when_units_are_recomputed() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)).train()
    recomputing, tokens = copy.deepcopy(plain), torch.randint(32, (2, 8))
    padded = torch.ones_like(tokens)
    padded[0, :3] = 0
    undo = checkpoint_units(recomputing, ActivationCheckpointing())
    for module in (plain, recomputing):
        module(input_ids=tokens, attention_mask=padded, labels=tokens).loss.backward()
    undo()

    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(recomputing.get_parameter(name).grad, parameter.grad)


def test_cache_with_positions_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)).train()
    tokens = torch.randint(32, (2, 8))
    prefix = model(input_ids=tokens).past_key_values
    checkpoint_units(model, ActivationCheckpointing())

    with pytest.raises(ConfigurationError, match="LlamaDecoderLayer gets a cache with 8 positions"):
        model(input_ids=tokens, past_key_values=prefix)


def test_buffers_are_updated_once_although_units_are_recomputed() -> None:
    torch.manual_seed(0)
    root = torch.nn.Sequential(Statistics(), Statistics())
    plain, batch = copy.deepcopy(root), torch.randn(6, 4)
    undo = checkpoint_units(root, ActivationCheckpointing(units=["Statistics"]))
    for _ in range(2):
        for module in (root, plain):
            loss = module(batch).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    undo()

    assert plain[0].calls == 2
    for name, buffer in plain.named_buffers():
        assert torch.equal(root.get_buffer(name), buffer), name
    for name, parameter in plain.named_parameters():
        assert torch.equal(root.get_parameter(name).grad, parameter.grad), name


def test_a_change_of_a_unit_input_in_place_is_an_error_on_the_cpu() -> None:
    class Changing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1.0
            return self.linear(x)

    root = torch.nn.Sequential(torch.nn.Linear(4, 4), Changing())
    undo = checkpoint_units(root, ActivationCheckpointing(units=["Changing"], offload_to_cpu=True))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        root(torch.ones(3, 4)).sum().backward()
    undo()
