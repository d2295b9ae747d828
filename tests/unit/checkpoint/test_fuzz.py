"""Damaged and hostile checkpoints are loaded or named by one error, in bounded memory.

All inputs run in one forked process with limited address space. Next to their folder is a file that no checkpoint may
read.
"""

import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import named_tensors, peek, verify
from lightning_paral.checkpoint.manifest import FILE_NAME, ChecksummedWriter, FileRecord, Manifest, sealed
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.planning.follow import run_isolated

SEED = 20
MAX_SECONDS = 2.0
MAX_BYTES = 200 * 2**20
NUM_MUTATED = 340
"""The number of mutated pickles, and twice the number of mutated copies of each file."""

Input = tuple[str, Callable[[Path], Any]]
"""The name of a checkpoint, and a function that changes a copy of it."""


def contents() -> dict[str, Any]:
    weights = {"a.weight": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5, dtype=torch.int64)}
    moments = {0: {"exp_avg": torch.ones(4, 3), "step": torch.tensor(3.0)}, 1: {"exp_avg": torch.ones(5)}}
    group = {"lr": 0.1, "params": [0, 1], "param_names": ["a.weight", "b"]}
    callbacks = {"kept": {"array": numpy.arange(3), "path": Path("data/x"), "best": torch.tensor(0.5)}}
    state = {"state": moments, "param_groups": [group]}
    return {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.5.0", "state_dict": weights,
        "optimizer_states": [state], "lr_schedulers": [], "callbacks": callbacks, "loops": {"fit_loop": {"n": 1}},
        "hyper_parameters": {"root": Path("/data"), "width": 3},
    }  # fmt: skip


def make_all(folder: Path) -> None:
    """Write an undamaged checkpoint in each format, by our writers and by torch's."""
    for form in ("full", "sharded"):
        own = contents() | {"lightning_paral": {"frozen": [], "random_states": []}}
        SaveJob.prepare(own, folder / form, form, RankGroup(), strategy="Test").write(RankGroup())  # type: ignore[arg-type]
    plain = contents()
    torch.save(plain, folder / "lightning.ckpt")
    tensors = {"state_dict": plain.pop("state_dict"), "optimizer_0": plain.pop("optimizer_states")[0]}
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(plain, folder / "dcp" / "meta.pt")


FILES = [
    *(("full", ""), ("lightning.ckpt", "")),
    *(("sharded", name) for name in ("manifest.json", ".metadata", "meta.pt", "__0_0.distcp")),
    *(("dcp", name) for name in (".metadata", "meta.pt", "__0_0.distcp")),
]


# Seeded mutation


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with a few bytes, slices or numbers changed."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(found) + 1) if found else 0
        length = min(chance.choice((1, 2, 4, 8, 40)), len(found) - place)
        kind = chance.randrange(6)
        if kind == 0:
            found[place : place + length] = chance.randbytes(length)
        elif kind == 1:
            del found[place : place + length]
        elif kind == 2:
            found[place:place] = found[place : place + length] * chance.choice((1, 3))
        elif kind == 3:
            found[place : place + 4] = struct.pack("<I", chance.choice((0, 2**31 - 1, 2**32 - 1, 2**31)))
        elif kind == 4:
            found[place : place + 8] = struct.pack("<Q", chance.choice((2**63 - 1, 2**64 - 1, 2**40)))
        else:
            del found[place:]
    return bytes(found)


def mutate(name: str, number: int) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(mutated(file.read_bytes(), random.Random(f"{SEED} {name} {number}")))
        if name and number % 2 and (path / FILE_NAME).exists():
            reseal(path)

    return act


def mutate_pickle(number: int) -> Callable[[Path], None]:
    """Change `data.pkl` only, so that no other check fails first."""

    def act(path: Path) -> None:
        rezip(path, lambda data: mutated(data, random.Random(f"{SEED} pickle {number}")))

    return act


def rezip(path: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite a file of `torch.save` with a different pickle."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist() if not name.endswith("lightning_paral.json")}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records.items():
            new.writestr(name, change(data) if name.endswith("data.pkl") else data)


def record_of(data: bytes) -> FileRecord:
    with ChecksummedWriter(io.BytesIO(), on_disk=False) as file:
        file.write(data)
    return file.record()


def reseal(path: Path) -> None:
    """Write a manifest that matches the files of a folder."""
    with_files = {f.name: record_of(f.read_bytes()) for f in path.iterdir() if f.name != FILE_NAME}
    about: dict[str, Any] = {"strategy": "Test", "world_size": 1, "epoch": 1, "global_step": 7}
    (path / FILE_NAME).write_text(Manifest(form="sharded", files=with_files, **about).to_json())


# Hostile inputs


def change_metadata(change: Callable[[dcp.metadata.Metadata], Any]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        found = pickle.loads((path / ".metadata").read_bytes())
        change(found)
        (path / ".metadata").write_bytes(pickle.dumps(found))
        if (path / FILE_NAME).exists():
            reseal(path)

    return act


KEY = "state_dict.a.weight"


def places(found: dcp.metadata.Metadata, **changed: Any) -> None:
    for info in found.storage_data.values():
        vars(info).update(changed)


def shape(found: dcp.metadata.Metadata, *sizes: int) -> None:
    stored: Any = found.state_dict_metadata[KEY]
    stored.size = torch.Size(sizes)


def add_chunk(found: dcp.metadata.Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    stored: Any = found.state_dict_metadata[KEY]
    stored.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    found.storage_data[dcp.metadata.MetadataIndex(KEY, offsets)] = dcp.filesystem._StorageInfo("__0_0.distcp", 0, 8)


def planned(found: dcp.metadata.Metadata, *path: Any) -> None:
    found.planner_data[KEY] = path


def many_chunks(found: dcp.metadata.Metadata) -> None:
    stored: Any = found.state_dict_metadata[KEY]
    stored.chunks *= 100_000


def nested(found: dcp.metadata.Metadata) -> None:
    inner: Any = ()
    for _ in range(900):
        inner = (inner,)
    found.planner_data[KEY] = inner


def column_chunks(found: dcp.metadata.Metadata) -> None:
    """Add so many chunks that comparing all pairs would take minutes."""
    stored: Any = found.state_dict_metadata[KEY]
    (place,) = (info for index, info in found.storage_data.items() if index.fqn == KEY)
    stored.size, stored.chunks = torch.Size((1, 3_000)), []
    for column in range(3_000):
        stored.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size((0, column)), torch.Size((1, 1))))
        found.storage_data[dcp.metadata.MetadataIndex(KEY, (0, column))] = place


def shared_object(path: Path) -> None:
    """Let many values be read from one long list."""
    data = io.BytesIO()
    torch.save([1] * 90_000, data)
    (path / "list").write_bytes(data.getvalue())
    names = [f"state_dict.x.{number}" for number in range(700)]
    with (path / ".metadata").open("rb") as file:
        found = pickle.load(file)
    for number, name in enumerate(names):
        place = dcp.filesystem._StorageInfo("./" * (number % 9) + "list", 0, len(data.getvalue()))
        found.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        found.storage_data[dcp.metadata.MetadataIndex(name)] = place
    (path / ".metadata").write_bytes(pickle.dumps(found))


OUTSIDE = ["../outside", "/etc/passwd", "a/../../outside", "", ".", "..", "\0", "x" * 5000, "__0_0.distcp/x"]
METADATA_CHANGES: list[Callable[[dcp.metadata.Metadata], Any]] = [
    *(lambda m, name=name: places(m, relative_path=name) for name in OUTSIDE),  # type: ignore[misc]
    *(lambda m, n=n: places(m, offset=n) for n in (-1, 2**31, 2**62, 2**70, 1.5, None, "0")),  # type: ignore[misc]
    *(lambda m, n=n: places(m, length=n) for n in (-1, 0, 2**31, 2**62, 2**70, None)),  # type: ignore[misc]
    *(lambda m, n=n: shape(m, n, 3) for n in (-4, 0, 2**40, 2**62)),  # type: ignore[misc]
    lambda m: shape(m, *[2**31] * 9),
    lambda m: shape(m),
    lambda m: add_chunk(m, (0, 0), (4, 3)),
    lambda m: add_chunk(m, (4, 0), (2**40, 3)),
    lambda m: add_chunk(m, (-1, 0), (1, 3)),
    *(lambda m, p=p: planned(m, *p) for p in (("a", 2_000_000_000), (0,), (), ("state_dict", 5, "x"), (-1,), (2**80,))),  # type: ignore[misc]
    lambda m: planned(m, *["a"] * 5000),
    lambda m: planned(m, {"a": 1}),
    many_chunks,
    column_chunks,
    nested,
    lambda m: m.state_dict_metadata.update(dict.fromkeys(range(3), dcp.metadata.BytesStorageMetadata())),
    lambda m: m.state_dict_metadata.update({"optimizer_x": dcp.metadata.BytesStorageMetadata()}),
    lambda m: m.state_dict_metadata.clear(),
    lambda m: m.storage_data.clear(),
    lambda m: setattr(m, "storage_data", None),
    lambda m: setattr(m, "planner_data", [1, 2]),
    lambda m: setattr(m, "state_dict_metadata", None),
]
"""Each change is applied to a sharded checkpoint, with matching checksums, and to a folder of torch."""

PROTO = b"\x80\x02"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + f"{module}\n{attribute}\n".encode()


def call(name: str, args: bytes) -> bytes:
    return named(name) + b"(" + args + b"tR"


def attributes(**values: str) -> bytes:
    return b"}" + b"".join(text(key) + text(value) + b"s" for key, value in values.items())


NUMBER = b"J" + struct.pack("<i", 2**31 - 1)
SLOTS = b"N" + attributes(as_posix="evil", _raw_paths="evil") + b"\x86b"
DTYPE = call("numpy.dtype", text("O8") + b"\x89\x88")
PLAIN_STATE = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
MEMBER = call("lightning.pytorch.trainer.states.TrainerFn", text("fit"))
KIND = b"clightning.pytorch.trainer.states\nTrainerFn\n"
FIELD = call("numpy.dtype", text("f8") + b"\x89\x88")
FIELDS = b"(K\x03" + text("|") + b"N(" + text("a") + b"t}" + text("a") + FIELD + b"M\xa0\x0f\x86sK\x08K\x01K\x10tb"
HOSTILE = {
    "state of a class": b"cpathlib\nPosixPath\n" + SLOTS,
    "state of a path": call("pathlib.PosixPath", text("x")) + SLOTS,
    "state of a member": MEMBER + attributes(_value_="evil") + b"b",
    "state of a member by a tensor's": call(
        "torch._tensor._rebuild_from_type_v2", KIND + KIND + text("fit") + b"\x85" + attributes(_value_="evil")
    ),
    "class of an object": b"cargparse\nNamespace\n)\x81" + attributes(__class__="evil") + b"b",
    "a new enumeration": call("lightning.pytorch.trainer.states.TrainerFn", text("A") + text("a b")),
    "objects that are none": DTYPE + PLAIN_STATE,
    "fields behind the end": call("numpy.dtype", text("V8") + b"\x89\x88") + FIELDS,
    "the process's dtype": call("numpy.dtype", text("f4") + b"\x89\x89"),
    "memory by size": call("builtins.bytearray", b"J\xff\xff\xff\x7f"),
    "a function": call("builtins.getattr", b"cpathlib\nPosixPath\n" + text("touch")),
}
"""Pickles that would change the process if they were loaded as torch does."""
LAUGHS = b"]q\x00" + b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 120))
"""Nested pairs whose `repr` and traversal take exponential time. They stay on the stack, the outermost last."""
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
PICKLES = [
    PROTO + b"}r\xff\xff\xff\xff.",
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
    PROTO + b"X\xff\xff\xff\x7fa.",
    PROTO + b"\x8b\xff\xff\xff\xff.",
    PROTO + b"]" * 60_000 + b".",
    PROTO + b"]q\x00" + b"(h\x00h\x00e" + b".",
    PROTO + b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (n, n - 1, n - 1) for n in range(1, 40)) + b".",
    PROTO + b"(" + LAUGHS + b"t.",
    PROTO + call("torch.device", LAUGHS) + b".",
    PROTO + call("collections.OrderedDict", b"") + b"(" + LAUGHS + b"tb.",
    PROTO + call("numpy.dtype", text("f8") + b"\x89\x88") + b"(" + LAUGHS + b"tb.",
    PROTO + call("torch._utils._rebuild_tensor", STORAGE + b"K\x00(" + LAUGHS + b"t)") + b".",
    PROTO + LAUGHS + b"}h%cNs." % 119,
    PROTO + b"N" + b"\x85" * 200_000 + b"}(h\x00Nu.",
    PROTO + b"(" * 50_000 + b".",
    PROTO + b"t" * 100 + b".",
    PROTO + b"}" + text("state_dict") + call("builtins.bytearray", NUMBER) + b"s.",
    PROTO + b"}" + text("state_dict") + call("torch.storage.UntypedStorage", NUMBER) + b"s.",
    PROTO + b"}" + text("state_dict") + call("torch.Tensor", NUMBER) + b"s.",
    PROTO + b"}" + text("state_dict") + call("numpy.ndarray", b"(" + NUMBER + b"t") + b"s.",
    PROTO + b"}" + text("a") + call("builtins.set", call("__builtin__.xrange", NUMBER)) + b"s.",
    PROTO + b"}" + text("a") + call("collections.Counter", call("__builtin__.xrange", NUMBER)) + b"s.",
    PROTO + b"}" + text("a") + call("torch.Size", call("__builtin__.xrange", NUMBER)) + b"s.",
    PROTO + b"}" + text("a") + DTYPE + PLAIN_STATE + b"s.",
    PROTO + b"}" + text("a") + call("torch.distributed.device_mesh.DeviceMesh", text("cpu") + b"(K\x00K\x01t") + b"s.",
    PROTO + b"}" + text("a") + call("os.system", text("touch ../ran")) + b"s.",
    PROTO + b"}" + text("a") + call("builtins.eval", text("1")) + b"s.",
    *(PROTO + hostile + b"." for hostile in HOSTILE.values()),
]


def pickled(data: bytes) -> Iterator[Input]:
    """Replace each pickle that is read."""
    yield "lightning.ckpt", lambda path: rezip(path, lambda _: data)
    yield "dcp", lambda path: (path / ".metadata").write_bytes(data)
    yield "dcp", lambda path: rezip(path / "meta.pt", lambda _: data)


def seal(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the contents of a manifest, and update its checksum."""

    def act(path: Path) -> None:
        content = json.loads((path / FILE_NAME).read_text())
        del content["checksum"]
        changed = change(content) or content
        (path / FILE_NAME).write_text(sealed(changed))

    return act


def file_named(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop("meta.pt")


MANIFESTS: list[Callable[[dict[str, Any]], Any]] = [
    *(lambda c, name=name: file_named(c, name) for name in OUTSIDE),  # type: ignore[misc]
    *(lambda c, name=name: c["names"].update({".metadata": name}) for name in OUTSIDE),  # type: ignore[misc]
    lambda c: c["files"].clear(),
    lambda c: c.update(files=[1]),
    lambda c: c["files"]["meta.pt"].update(blocks=[[0, 0, 0]] * 30_000),
    lambda c: c["files"]["meta.pt"].update(blocks=[[0, 2**70, 0]], bytes=2**70),
    lambda c: c["files"]["meta.pt"].update(bytes="12"),
    lambda c: c.update(form="full"),
    lambda c: c.update(format="2"),
    lambda c: c.update(format=10**4000),
    lambda c: c.update(names={"meta.pt": 5}),
    lambda c: c.update(more=1),
    lambda c: {"checksum": ""},
]


def raw_manifest(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path / FILE_NAME).write_bytes(data) and None


def bomb(path: Path) -> None:
    """Write a compressed manifest that is a thousand times as large when it is inflated."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("full/lightning_paral.json", b"[" * (300 * 2**20))
        archive.comment = b"lightning_paral %016x %016x" % (0, 0)


def deflated(path: Path) -> None:
    rezip(path, lambda _: PROTO + b"(" + b"N" * (300 * 2**20) + b"t.", zipfile.ZIP_DEFLATED)


def nested_records(path: Path) -> None:
    """Put a second `data.pkl` into the data of another record."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("lightning/data.pkl", pickle.dumps({}, 2))
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr("lightning/version", inner.getvalue())
        about = archive.infolist()[0]
        about.header_offset = len("lightning/version") + 30
        outer.filelist.append(about)


def tensor_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Callable[[Path], Any]:
    """Replace a file by one that has a tensor with few bytes and a large shape."""
    return lambda path: torch.save({"state_dict": {"a": torch.ones(1).as_strided(shape, stride)}}, path)


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        file = path / name if name else path
        (shutil.rmtree if file.is_dir() else Path.unlink)(file)
        make(file)

    return act


INSTEAD: list[Callable[[Path], Any]] = [
    *(os.mkfifo, Path.mkdir, lambda file: os.mknod(file, 0o140600)),  # a socket
    *(lambda file: file.symlink_to(file.parents[1] / "outside"), lambda file: file.symlink_to("/dev/zero")),
]


CHECKPOINTS = [
    *([], 3, None, {}, {"state_dict": 3}, {"state_dict": {3: 3}}, {"state_dict": {}, "optimizer_states": 3}),
    *({"state_dict": {}, "optimizer_states": states} for states in ([3], [{}, []], [{"param_groups": 3}])),
    {"state_dict": {}, "optimizer_states": [{"param_groups": [{}]}]},
]


def hostile() -> Iterator[Input]:
    for change in METADATA_CHANGES:
        yield "sharded", change_metadata(change)
        yield "dcp", change_metadata(change)
    for data in PICKLES:
        yield from pickled(data)
    for about in MANIFESTS:
        yield "sharded", seal(about)
    for text_ in (b"[" * 200_000, b'{"a":' * 100_000, b"", b"null", b"[]", b"9" * 10_000, b"\xff" * 100, b"[1," * 99):
        yield "sharded", raw_manifest(text_)
    yield "dcp", shared_object
    yield "full", bomb
    yield "lightning.ckpt", deflated
    yield "lightning.ckpt", nested_records
    for sizes, stride in (((2**40,), (0,)), ((2**20, 2**20), (0, 0)), ((2**62, 0), (0, 1))):
        yield "lightning.ckpt", tensor_of(sizes, stride)
    for form, name in FILES:
        for make in INSTEAD:
            yield form, instead(name, make)
    for value in CHECKPOINTS:
        yield "lightning.ckpt", lambda path, value=value: torch.save(value, path)  # type: ignore[misc]
        yield "dcp", lambda path, value=value: torch.save(value, path / "meta.pt")  # type: ignore[misc]


# Running the inputs


def status(field: str) -> int:
    """Return a number of bytes that Linux reports about this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure_peak_anew() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def try_one(path: Path) -> str:
    """Load, read and verify; return the outcome."""
    try:
        _, found = peek(path)
        for _, tensor in named_tensors(found):
            if tensor.device.type == "cpu":
                materialize(tensor)
        verify(path)
    except CheckpointError as error:
        said = str(error)
    else:
        return "loaded"
    assert str(path) in said, f"it does not name the checkpoint: {said}"
    assert verify(path), said
    return "refused"


def classes_of_the_process() -> str:
    from lightning.pytorch.trainer.states import TrainerFn

    named_kinds = [Path, type(Path()), dcp.metadata.TensorStorageMetadata, dcp.metadata.TensorProperties, numpy.ndarray]
    kinds = [sorted(f"{key} {id(value)}" for key, value in vars(kind).items()) for kind in named_kinds]
    members = [(str(member), sorted(map(str, vars(member).items()))) for member in TrainerFn]
    return repr((kinds, members, numpy.dtype("O").flags, numpy.dtype("f4").str))


def run_all(work: Path, inputs: list[Input]) -> dict[str, Any]:
    sound = work / "sound"
    outside = sorted((str(path), path.read_bytes()) for path in sound.rglob("*") if path.is_file())
    before = classes_of_the_process()
    for form in {form for form, _ in inputs}:
        assert try_one(sound / form) == "loaded"
    told: dict[str, Any] = {"inputs": 0, "loaded": 0, "refused": 0, "seconds": 0.0, "peak_bytes": 0, "faults": []}
    cage = work / "cage"
    for number, (form, change) in enumerate(inputs):
        cage.mkdir()
        (cage / "outside").write_bytes(b"secret")
        path = cage / form
        (shutil.copytree if (sound / form).is_dir() else shutil.copy)(sound / form, path)
        try:
            change(path)
            files = tree(cage)
            measure_peak_anew()
            resident = status("VmRSS")
            resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + MAX_BYTES, resource.RLIM_INFINITY))
            start, ended = time.process_time(), "failed"
            try:
                ended = try_one(path)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            seconds = time.process_time() - start
            told[ended] += 1
            told["seconds"] = max(told["seconds"], seconds)
            told["peak_bytes"] = max(told["peak_bytes"], status("VmHWM") - resident)
            if seconds > MAX_SECONDS or tree(cage) != files or classes_of_the_process() != before:
                told["faults"].append(f"input {number} ({form}): {seconds:.1f} s, or something was changed")
        except BaseException:
            told["faults"].append(f"input {number} ({form}): {traceback.format_exc()[-1500:]}")
        told["inputs"] += 1
        shutil.rmtree(cage)
    assert outside == sorted((str(path), path.read_bytes()) for path in sound.rglob("*") if path.is_file())
    return told


def tree(folder: Path) -> list[Any]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ino) for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_mutated", "num_inputs", "num_loaded"),
    [(20, 300, 20), pytest.param(NUM_MUTATED, 2000, 50, marks=pytest.mark.lane("all"))],
)
def test_each_damaged_or_hostile_checkpoint_is_loaded_or_named(
    tmp_path: Path, num_mutated: int, num_inputs: int, num_loaded: int
) -> None:
    (tmp_path / "sound").mkdir()
    make_all(tmp_path / "sound")
    inputs = [(form, mutate(name, number)) for form, name in FILES for number in range(num_mutated // 2)]
    inputs += [("lightning.ckpt", mutate_pickle(number)) for number in range(num_mutated)]
    inputs += hostile()
    told = run_isolated(lambda: run_all(tmp_path, inputs))
    print({key: value for key, value in told.items() if key != "faults"})
    assert told["faults"] == []
    assert told["inputs"] == len(inputs) >= num_inputs
    assert told["loaded"] > num_loaded
    assert told["peak_bytes"] < MAX_BYTES
