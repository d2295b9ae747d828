"""`from_pretrained` in `configure_model` loads the values of the folder, without a full copy on any rank."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import transformers

from lightning_paral.engines.zero.engine.construction import warn_about_different_draws
from lightning_paral.model.deferred import recorder
from tests.benchmarks.from_pretrained import large, peaks_of
from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.models.hugging_face import VOCABULARY, Wrapped, made, tokens
from tests.models.late_import import ImportsLate, load_late
from tests.rank_pool import RankError, RankPool
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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of a rank before the first step."""

    values: dict[str, Tensor]
    """Full parameters, and buffers."""
    drawn_next: Tensor
    """Random numbers drawn after the model is loaded."""
    partitioned: bool
    written: int
    """The largest number of bytes of mapped files that this rank has written to, and so copied."""
    num_broadcasts: int


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


def written_to(folder: str) -> int:
    """Return the number of bytes of mapped files in `folder` that this process has written to, and so copied."""
    found = re.findall(
        rf"^[0-9a-f]+-[0-9a-f]+ .* {re.escape(folder)}/\S+\n(?:\w+: .*\n)*?Anonymous: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return sum(map(int, found)) * 1024


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
    module, written, num_broadcasts = Loaded(kind, folder, then), 0, 0
    broadcast, threshold_before = dist.broadcast, recorder.DEFERRED_BYTES

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal written, num_broadcasts
        result = broadcast(*args, **kwargs)
        written, num_broadcasts = max(written, written_to(folder)), num_broadcasts + 1
        return result

    dist.broadcast, recorder.DEFERRED_BYTES = watched, threshold_bytes
    try:
        trainer = quiet_trainer(strategy=strategy_of(label), devices=num_ranks, max_steps=1, precision=precision)
        trainer.fit(module, DataLoader(tokens(), batch_size=4))
    finally:
        dist.broadcast, recorder.DEFERRED_BYTES = broadcast, threshold_before
    return Seen(
        values=module.values,
        drawn_next=module.drawn_next,
        partitioned=module.partitioned,
        written=written,
        num_broadcasts=num_broadcasts,
    )


def assert_as_in_one_process(
    ranks: list[Seen], kind: str, folder: Path, then: Any = None, precision: Any = None
) -> None:
    expected = load("one process", 1, kind, str(folder), then, precision=precision)
    for seen in ranks:
        assert seen.values.keys() == expected.values.keys()
        for name, value in seen.values.items():
            assert value.dtype == expected.values[name].dtype, name
            assert torch.equal(value, expected.values[name]), name
        assert torch.equal(seen.drawn_next, expected.drawn_next)


@pytest.mark.parametrize(
    ("size", "kind"), [*(("5GB", kind) for kind in KINDS), *(("10KB", kind) for kind in (KINDS[0], KINDS[-1]))]
)
@pytest.mark.parametrize("label", DIVIDED)
def test_values_equal_the_folder_and_no_rank_copies_the_files(
    on_ranks, tmp_path: Path, label: str, kind: str, size: str
) -> None:
    saved = made(kind)
    saved.save_pretrained(tmp_path, max_shard_size=size)
    ranks = on_ranks(2, load, label, 2, kind, str(tmp_path))
    assert_as_in_one_process(ranks, kind, tmp_path)
    for seen in ranks:
        for name, parameter in saved.named_parameters():
            assert torch.equal(seen.values[f"model.{name}"], parameter), name
        assert seen.partitioned
        assert seen.num_broadcasts, "values came by another way, and it would have to be watched"
        assert seen.written == 0


def test_weights_drawn_on_another_device_than_in_one_process_are_named(tmp_path: Path) -> None:
    kind = "BertForSequenceClassification"
    made(kind).bert.save_pretrained(tmp_path)
    model = getattr(transformers, kind).from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"^classifier\.weight, classifier\.bias: initialized on CPU"):
        warn_about_different_draws(dict(model.named_parameters()), torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_different_draws(dict(model.named_parameters()), torch.device("cpu"))
        warn_about_different_draws(dict(model.bert.named_parameters()), torch.device("cuda"))


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


def load_another(module: Any) -> None:
    module.teacher = transformers.GPT2LMHeadModel.from_pretrained(module.folder).requires_grad_(False)
    module.fresh = transformers.GPT2LMHeadModel(module.model.config).requires_grad_(False)


class Nested(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.inner = transformers.GPT2LMHeadModel.from_pretrained(folder)
        self.gate = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3, 3).tril())


def nest(module: Any) -> None:
    module.nested = Nested(module.folder).requires_grad_(False)


def convert(module: Any) -> None:
    module.model = transformers.GPT2LMHeadModel.from_pretrained(module.folder, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    kind: str = "GPT2LMHeadModel"
    then: Any = None
    """What `configure_model` does with the loaded model."""
    threshold_bytes: int = 16
    precision: Any = None
    whole: bool = True
    """Whether the folder has all weights. Otherwise some are drawn."""

    def __str__(self) -> str:
        then = "whole" if self.whole else "part"
        return f"{self.kind}, {self.then.__name__ if self.then else then}, {self.threshold_bytes}, {self.precision}"


DEFERRED, BERT = recorder.DEFERRED_BYTES, "BertForSequenceClassification"
DRAWN = [Case(BERT, None, threshold_bytes, whole=False) for threshold_bytes in (16, DEFERRED)]
OF_DIVIDED = [
    *DRAWN,
    *(Case(then=then) for then in (resize, add_head, change, load_another, nest, convert)),
    *(Case(then=then, threshold_bytes=DEFERRED) for then in (resize, nest)),
    *(Case(then=then, precision="bf16-true") for then in (resize, change, load_another, nest)),
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
    (saved if case.whole else saved.base_model).save_pretrained(tmp_path)
    run = partial(load, label, 2, case.kind, str(tmp_path), case.then, case.threshold_bytes, case.precision)
    if (label, case.then) == ("paral_zero3", convert):
        with pytest.raises(RankError, match=r"wte\.weight has dtype bfloat16.*precision='bf16-true'"):
            on_ranks(2, run)
    else:
        assert_as_in_one_process(on_ranks(2, run), case.kind, tmp_path, case.then, case.precision)


@pytest.mark.parametrize("label", DIVIDED)
def test_transformers_may_be_imported_late(tmp_path: Path, label: str) -> None:
    made("BertForSequenceClassification").bert.save_pretrained(tmp_path)
    module = ImportsLate(str(tmp_path))
    module.configure_model()
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    pool = RankPool()  # its processes have not imported transformers
    try:
        for imported_before, values in pool.run(2, load_late, label, str(tmp_path)):
            assert not imported_before
            assert values.keys() == expected.keys()
            for name, value in values.items():
                assert torch.equal(value, expected[name]), name
    finally:
        pool.close()


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
