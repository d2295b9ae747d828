"""Modules among the hyper-parameters are saved as under ddp: with full, plain tensors and the current weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paral import ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.load_from_checkpoint import read_folder
from tests.models.hyper_parameters import Given, fit, make_net


def make(label: str, form: Any) -> Any:
    if label == "fsdp":
        return ParalFSDPStrategy(checkpoint=form, min_params=1)
    return ParalZeROStrategy(stage=int(label[-1]), checkpoint=form)


def fit_on_rank(label: str, form: str, path: str) -> None:
    fit(make(label, form), path, 2)


def attributes(module: nn.Module) -> dict[str, Any]:
    return {name: (type(part), sorted(vars(part))) for name, part in module.named_modules()}


@pytest.mark.parametrize(
    ("label", "form"), [("fsdp", "sharded"), ("fsdp", "full"), ("zero2", "full"), ("zero3", "sharded")]
)
def test_modules_are_saved_with_full_plain_tensors(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, fit_on_rank, label, form, path)

    if form == "full":
        checkpoint = torch.load(path, weights_only=False)
    else:
        checkpoint = read_folder(path, weights_only=False)
    net, more = (checkpoint["hyper_parameters"][name] for name in ("net", "more"))
    plain = make_net()
    assert attributes(net) == attributes(plain)
    assert type(checkpoint["hyper_parameters"]["loss"]) is nn.MSELoss
    assert more["parts"][0] is net[3]
    assert more["parts"][1].head is net[0]
    assert [len(part._forward_hooks) for part in net.modules()] == [0, 1, 0, 0, 0]
    installed = ("_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    assert not any(getattr(part, name) for part in net.modules() for name in installed)
    for name, value in net.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"net.{name}"] + 0)
    assert not torch.equal(net[0].weight, plain[0].weight)
    net(torch.ones(3, 6)).sum().backward()
    loaded = Given.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(loaded.net[0].weight, net[0].weight)
