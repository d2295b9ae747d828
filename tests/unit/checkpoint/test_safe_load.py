"""Loading restores data exactly, and changes no state of the process."""

import codecs
import io
import os
import pickle
import random
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path, PosixPath
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.checkpoint.reader import Entry, Location, load_metadata
from lightning_paral.checkpoint.safe_load import load_safely
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup


def tagged() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = 3  # type: ignore[attr-defined]
    return parameter


VALUES = [
    *(numpy.arange(3), numpy.zeros((2, 3), order="F"), numpy.array(["ä"]), numpy.array([b"ab"])),
    *(numpy.arange(3, dtype="i4"), numpy.bool_(True), numpy.ones((0, 3)), {b"": 1}),
    *(dict.fromkeys(numpy.arange(300)), dict.fromkeys(product(range(-20, 0), repeat=2)), {(timedelta(1), Path()): 2}),
    *(numpy.float64(1.5), numpy.random.default_rng(1).bit_generator.state),
    *(Namespace(a=1, path=Path("x/y")), Path("/x/y"), Path(), Decimal("1.20")),
    *(datetime(2026, 1, 2, tzinfo=UTC), date(2026, 1, 2), timedelta(3), timezone(timedelta(hours=1), "a")),
    *({(a, b, 7): a for a in range(70) for b in range(70)}, {2**62: 1}),
    *({1, 2}, {(1, "a")}, frozenset([2]), range(3), slice(1, 2), 1 + 2j, b"", b"ab", bytearray(b"ab"), bytearray()),
    *(Counter("aab"), OrderedDict(b=2), 2**100, -5, None, (1, (2, (3,))), "ü", random.Random(1).getstate()),
    *(tagged(), nn.BatchNorm1d(3).state_dict(), torch.ones(3).expand(4, 3), torch.zeros(0), torch.tensor(3)),
    *(
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.ones(2, 2)[:, 0],
        torch.ones(2).to(torch.bfloat16),
    ),
    *(torch.zeros(3, dtype=torch.float8_e4m3fn), torch.view_as_complex(torch.ones(2, 2)).conj(), torch.get_rng_state()),
    *(torch.float32, torch.strided, torch.Size([1, 2]), torch.device("cuda", 0), torch.per_tensor_affine),
]


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"value": value, "again": [value]}, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_are_restored(value: Any) -> None:
    found = load_safely(saved(value))["value"]
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_types_admitted_by_the_user_stay_admitted() -> None:
    with torch.serialization.safe_globals([PosixPath]):
        load_safely(saved(Path("x")))
        assert PosixPath in torch.serialization.get_safe_globals()
    assert PosixPath not in torch.serialization.get_safe_globals()


REFUSED = {
    "dtype 'O8'": numpy.array([1, "a", None], dtype=object),
    "dtype 'M8'": numpy.array(["2020-01-01"], dtype="M8[s]"),
    "dtype 'V12'": numpy.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "fractions.Fraction": Fraction(1, 3),
    "trainer.states.TrainerFn": TrainerFn.FITTING,
    "found index 9": torch.sparse_coo_tensor([[9]], [1.0], (3,), check_invariants=False),
    "key <decimal.Decimal>": {Decimal(1): 1},
    r"key \(1, 2\)": {((1, 2), 3): 1},
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_data_are_refused(said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_safely(saved(REFUSED[said]))


def test_deeply_nested_data_are_refused() -> None:
    value: Any = 3
    for _ in range(900):
        value = (value,)
    with pytest.raises(CheckpointError, match="its pickle is nested more than 100 deep"):
        load_safely(saved(value))


# Metadata


def written_by_torch(folder: Path) -> bytes:
    tensors = {"state_dict": {"a": torch.ones(3, 2), "b": [torch.zeros(2), 3]}, "c": torch.ones(()), "d": "text"}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


def entries(found: Metadata) -> list[Entry]:
    """Return what torch's reader knows about a checkpoint."""

    def place(key: str, offsets: Any = None) -> Location:
        info = found.storage_data[MetadataIndex(key, offsets)]
        return Location(info.relative_path, info.offset, info.length)

    known = []
    for key, value in found.state_dict_metadata.items():
        path = found.planner_data[key]
        if isinstance(value, BytesStorageMetadata):
            known.append(Entry(key, path, place(key)))
        else:
            chunks = [(Chunk(tuple(c.offsets), tuple(c.sizes)), place(key, c.offsets)) for c in value.chunks]
            known.append(Entry(key, path, None, value.properties.dtype, tuple(value.size), tuple(chunks)))
    return known


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("release", ["this", "older", "newer"])
def test_metadata_equal_those_read_by_torch(tmp_path: Path, protocol: int, release: str) -> None:
    """Fields of later releases are ignored, and those that earlier releases do not write may be missing."""
    found = pickle.loads(written_by_torch(tmp_path))
    expected = entries(found)
    if release == "older":
        for name in ("version", "storage_meta"):
            del found.__dict__[name]
    elif release == "newer":
        for info in found.storage_data.values():
            info.later = {"a": (1, 2)}
        found.later, found.storage_meta.later = [Path("x")], os.system
    assert load_metadata(pickle.dumps(found, protocol), ".metadata") == expected


def test_compressed_tensors_are_named(tmp_path: Path) -> None:
    found = pickle.loads(written_by_torch(tmp_path))
    for info in found.storage_data.values():
        info.transform_descriptors = ["zstd"]
    with pytest.raises(CheckpointError, match="written with transforms"):
        load_metadata(pickle.dumps(found), ".metadata")


FAULTS: dict[str, Callable[[Metadata, Any], Any]] = {
    "6 of 6 elements are in no chunk": lambda _, stored: stored.chunks.clear(),
    "overlap": lambda _, stored: stored.chunks.extend(stored.chunks),
    "is outside of shape (2, 2)": lambda _, stored: setattr(stored, "size", torch.Size([2, 2])),
    "has no location for state_dict.a at (0, 0)": lambda metadata, _: metadata.storage_data.pop(
        MetadataIndex("state_dict.a", torch.Size([0, 0]))
    ),
}


@pytest.mark.parametrize("said", FAULTS)
def test_chunks_that_do_not_cover_a_tensor_once_are_named(tmp_path: Path, said: str) -> None:
    found = pickle.loads(written_by_torch(tmp_path))
    torch.save({"epoch": 1}, tmp_path / "meta.pt")
    assert verify(tmp_path) == []
    FAULTS[said](found, found.state_dict_metadata["state_dict.a"])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    (fault,) = verify(tmp_path)
    assert "state_dict.a" in fault
    assert said in fault
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, RankGroup())
    assert fault in str(raised.value)


# Paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = {"epoch": 0, "global_step": 1, "state_dict": {"a": torch.ones(3)}}
    SaveJob.prepare(checkpoint, tmp_path / "x.ckpt", "sharded", RankGroup(), strategy="Test").write(RankGroup())
    return tmp_path / "x.ckpt"


def test_links_to_a_checkpoint_and_inside_it_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("x.ckpt")
    (folder / "__0_0.distcp").rename(folder / "moved")
    (folder / "__0_0.distcp").symlink_to("moved")
    full = {"epoch": 0, "global_step": 1, "state_dict": {"a": torch.ones(3)}}
    (tmp_path / "elsewhere").mkdir()
    SaveJob.prepare(full, tmp_path / "elsewhere" / "y.ckpt", "full", RankGroup(), strategy="Test").write(RankGroup())
    (tmp_path / "link.ckpt").symlink_to("elsewhere/y.ckpt")
    for name in ("last.ckpt", "link.ckpt"):
        assert load(tmp_path / name, RankGroup())["global_step"] == 1
        assert verify(tmp_path / name) == []


class Copies:
    """Is pickled as a call that copies `value`."""

    def __init__(self, make: Any, *args: Any) -> None:
        self.reduced = make, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("call", [(codecs.encode, "x" * 100_000, "latin1"), (set, list(range(100_000)))])
def test_value_that_many_calls_copy_is_refused(tmp_path: Path, call: Any) -> None:
    torch.save([Copies(*call) for _ in range(100)], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="copies the same values too often"):
        load_safely(tmp_path / "x.pt")
