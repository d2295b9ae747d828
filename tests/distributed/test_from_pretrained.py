"""`from_pretrained` in `configure_model`: its values on every rank's part, and no copy of the whole model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import transformers

from tests.hugging_face_models import Wrapped, made, tokens
from tests.models import quiet_trainer
from tests.sampling_models import strategy_of

KINDS = ("GPT2LMHeadModel", "T5ForConditionalGeneration", "LlamaForCausalLM", "BertForSequenceClassification")


class Loaded(Wrapped):
    def __init__(self, kind: str, folder: str) -> None:
        super(Wrapped, self).__init__()
        self.kind, self.folder = kind, folder
        self.values: dict[str, Tensor] = {}
        self.partitioned: set[bool] = set()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(5)  # for weights that are not in the folder
            self.model = getattr(transformers, self.kind).from_pretrained(self.folder)

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        for name, parameter in self.model.named_parameters():
            self.values[name] = strategy.full_parameter(parameter).cpu()
            self.partitioned.add(hasattr(parameter, "ds_id") or hasattr(parameter, "placements"))


def written_to(folder: str) -> int:
    """Bytes that this process holds of its own of files in `folder` which it has mapped: pages written to."""
    found = re.findall(
        rf"^[0-9a-f]+-[0-9a-f]+ .* {re.escape(folder)}/\S+\n(?:\w+: .*\n)*?Anonymous: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return sum(map(int, found)) * 1024


def load(label: str, kind: str, folder: str) -> tuple[dict[str, Tensor], set[bool], int, int]:
    """Fit a step; return the first values, whether parameters are divided, and the bytes written into the files."""
    module, peak, num_calls = Loaded(kind, folder), 0, 0
    broadcast = dist.broadcast

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak, num_calls
        result = broadcast(*args, **kwargs)
        peak, num_calls = max(peak, written_to(folder)), num_calls + 1
        return result

    dist.broadcast = watched
    try:
        trainer = quiet_trainer(strategy=strategy_of(label), devices=2, max_steps=1)
        trainer.fit(module, DataLoader(tokens(), batch_size=4))
    finally:
        dist.broadcast = broadcast
    return module.values, module.partitioned, peak, num_calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", ["paral_fsdp", "paral_zero3"])
@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_values_are_those_of_the_folder_and_no_rank_copies_the_files(
    on_ranks, tmp_path: Path, label: str, kind: str, size: str
) -> None:
    made(kind).save_pretrained(tmp_path, max_shard_size=size)
    expected = dict(getattr(transformers, kind).from_pretrained(tmp_path).named_parameters())
    for values, partitioned, written, num_calls in on_ranks(2, load, label, kind, str(tmp_path)):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
        assert partitioned == {True}
        assert num_calls, "values came by another way, and it would have to be watched"
        assert written == 0


@pytest.mark.parametrize("label", ["paral_fsdp", "paral_zero3"])
def test_weights_that_are_not_in_the_folder_are_drawn_as_in_one_process(on_ranks, tmp_path: Path, label: str) -> None:
    made("BertForSequenceClassification").bert.save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = transformers.BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    for values, *_ in on_ranks(2, load, label, "BertForSequenceClassification", str(tmp_path)):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
