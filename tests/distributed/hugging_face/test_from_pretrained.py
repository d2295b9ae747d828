"""`from_pretrained` in `configure_model` loads the values of the folder, without a full copy on any rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import transformers

from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.model.deferred import recorder
from tests.benchmarks.from_pretrained import large, peaks_of
from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.models.hugging_face import VOCABULARY, Wrapped, made, tokens
from tests.running import quiet_trainer

KINDS = (
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "LlamaForCausalLM",
    "BertForSequenceClassification",
    "MixtralForCausalLM",
)
DIVIDED = labels(case for case in with_ranks(MAIN, 2) if case.shards_parameters)
WHOLE = labels(case for case in with_ranks(MAIN, 2) if not case.shards_parameters)


class Seen(NamedTuple):
    """The state of a rank before the first step."""

    values: dict[str, Tensor]
    """Full parameters, and buffers."""
    drawn_next: Tensor
    """Random numbers drawn after the model is loaded."""
    partitioned: bool


class Loaded(Wrapped):
    def __init__(self, kind: str, folder: str, then: Callable[[Any], None] | None = None) -> None:
        super(Wrapped, self).__init__()
        self.kind, self.folder, self.then = kind, folder, then

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(5)  # for weights that are not in the folder
            self.model = getattr(transformers, self.kind).from_pretrained(self.folder)
            if self.then is not None:
                self.then(self)
            self.drawn_next = torch.rand(4)

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        whole = getattr(strategy, "full_parameter", lambda parameter: parameter)
        self.values = {name: whole(p).detach().to("cpu", p.dtype, copy=True) for name, p in self.named_parameters()}
        self.values |= {name: buffer.cpu().clone() for name, buffer in self.named_buffers()}
        self.partitioned = all(hasattr(p, "ds_id") or hasattr(p, "placements") for p in self.parameters())


def load(
    label: str,
    num_ranks: int,
    kind: str,
    folder: str,
    then: Any = None,
    threshold_bytes: int = recorder.DEFERRED_BYTES,
    precision: Any = None,
) -> Seen:
    """Load the model and fit one step. *Collective* if there are several ranks."""
    module = Loaded(kind, folder, then)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "DEFERRED_BYTES", threshold_bytes)
        trainer = quiet_trainer(strategy=strategy_of(label), devices=num_ranks, max_steps=1, precision=precision)
        trainer.fit(module, DataLoader(tokens(), batch_size=4))
    return Seen(module.values, module.drawn_next, module.partitioned)


def resize(module: Any) -> None:
    module.model.resize_token_embeddings(VOCABULARY + 5)


def add_head(module: Any) -> None:
    module.head = nn.Linear(2, 2)
    nn.init.orthogonal_(module.head.weight)


def change(module: Any) -> None:
    module.model.transformer.wte.weight.data.normal_(std=0.1)
    with torch.no_grad():
        module.model.transformer.h[0].mlp.c_fc.weight[3:5] *= 2
    module.model.transformer.h[1].apply(lambda part: part.requires_grad_(False))


def convert(module: Any) -> None:
    module.model = transformers.GPT2LMHeadModel.from_pretrained(module.folder, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    kind: str = "GPT2LMHeadModel"
    then: Any = None
    """What `configure_model` does with the loaded model."""
    threshold_bytes: int = 16
    precision: Any = None
    max_shard_size: str = "5GB"
    whole: bool = True
    """Whether the folder has all weights. Otherwise some are drawn."""

    def __str__(self) -> str:
        then = self.then.__name__ if self.then else "whole" if self.whole else "part"
        return ", ".join(map(str, (self.kind, then, self.threshold_bytes, self.precision, self.max_shard_size)))


DEFERRED, BERT = recorder.DEFERRED_BYTES, "BertForSequenceClassification"
DRAWN = [Case(BERT, None, threshold_bytes, whole=False) for threshold_bytes in (16, DEFERRED)]
OF_DIVIDED = [
    *DRAWN,
    *(Case(kind, threshold_bytes=DEFERRED) for kind in KINDS),
    *(Case(kind, threshold_bytes=DEFERRED, max_shard_size="10KB") for kind in (KINDS[0], KINDS[-1])),
    *(Case(then=then) for then in (resize, add_head, change, convert)),
    Case(then=resize, threshold_bytes=DEFERRED),
    *(Case(then=then, precision="bf16-true") for then in (resize, change)),
    *(Case(kind, precision="bf16-true", whole=False) for kind in KINDS),
    *(Case(kind, precision="bf16-mixed", whole=False) for kind in (KINDS[0], KINDS[-1])),
]
OF_WHOLE = [*DRAWN, *(Case(kind, threshold_bytes=DEFERRED) for kind in ("GPT2LMHeadModel", BERT))]


@pytest.mark.parametrize(
    ("label", "case"),
    [
        *((label, case) for label in DIVIDED for case in OF_DIVIDED),
        *((label, case) for label in WHOLE for case in OF_WHOLE),
    ],
    ids=str,
)
def test_values_equal_one_process(on_ranks, tmp_path: Path, label: str, case: Case) -> None:
    saved = made(case.kind)
    (saved if case.whole else saved.base_model).save_pretrained(tmp_path, max_shard_size=case.max_shard_size)
    run = partial(load, label, 2, case.kind, str(tmp_path), case.then, case.threshold_bytes, case.precision)
    if (label, case.then) == ("paral_zero3", convert):
        with pytest.raises(RankError, match=r"wte\.weight has dtype bfloat16.*set Trainer\(precision="):
            on_ranks(2, run)
    else:
        ranks = on_ranks(2, run)
        expected = load("one process", 1, case.kind, str(tmp_path), case.then, precision=case.precision)
        for seen in ranks:
            assert seen.values.keys() == expected.values.keys()
            for name, value in seen.values.items():
                assert value.dtype == expected.values[name].dtype, name
                assert torch.equal(value, expected.values[name]), name
            assert torch.equal(seen.drawn_next, expected.drawn_next)
            assert seen.partitioned is (label in DIVIDED)
        if case.whole and case.then is None and case.precision is None:
            assert all(torch.equal(expected.values[f"model.{name}"], p) for name, p in saved.named_parameters())


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[RankPool]:
    """Ranks whose memory earlier tests have not fragmented."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(("precision", "bytes_each"), [("32-true", 4), ("bf16-true", 2)])
@pytest.mark.parametrize("label", DIVIDED)
def test_a_rank_holds_less_than_a_copy_of_the_model(
    new_ranks: RankPool, tmp_path: Path, label: str, precision: Any, bytes_each: int
) -> None:
    model = large()
    model.save_pretrained(tmp_path / "large", max_shard_size="20MB")
    made("GPT2LMHeadModel").save_pretrained(tmp_path / "small")
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * bytes_each
    new_ranks.run(2, peaks_of, label, str(tmp_path / "small"), precision)  # imports what the first use imports
    for own, _ in new_ranks.run(2, peaks_of, label, str(tmp_path / "large"), precision):
        assert own < 0.9 * num_bytes
