"""Save a checkpoint: list what each rank writes, write next to the target, agree on success, commit by a rename.

The steps of a save, with the files to read:

1. `sharded_state.py`, `weights.py`: Lightning collects this rank's shards before it calls the strategy.
2. `tree.py`, `shards.py`: list the tensors, and the elements of them that this rank writes.
3. Here or in `full.py`: write them, into a new folder or file next to the target.
4. `manifest.py`: rank 0 writes the manifest after all ranks have succeeded.
5. `commit.py`: rename the new folder or file to the target.

After each step, the ranks agree in `distributed/exchange.py` whether all of them succeeded.
"""

import logging
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from lightning_paral.checkpoint.background import Staging
from lightning_paral.checkpoint.commit import AtomicPath, check_replaceable, check_replaceable_at
from lightning_paral.checkpoint.full import write_full
from lightning_paral.checkpoint.layout import Chunk
from lightning_paral.checkpoint.manifest import FILE_NAME, META, METADATA, FileRecord, Manifest
from lightning_paral.checkpoint.optimizer_state import OTHER_ENTRIES_KEY, by_fqn
from lightning_paral.checkpoint.shards import alone, flat, is_sharded
from lightning_paral.checkpoint.storage import Folder, FsspecStorage, LocalStorage, file_system, is_remote, put_file
from lightning_paral.checkpoint.tree import (
    WEIGHT_KEYS,
    Kind,
    SavedTensor,
    TreePath,
    check_shards,
    host_copy,
    insert,
    is_state_key,
    leaves,
    name_of,
    replace_at,
    serialized,
    tensors_in,
    tensors_to_save,
)
from lightning_paral.compat.torch.distributed_checkpoint import StorageInfo
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError
from lightning_paral.options import Form

_ALIGNMENT = 64

_log = logging.getLogger(__name__)


@dataclass
class SaveJob:
    """A checkpoint to write to `path`. All ranks prepare the same job and call the same methods."""

    path: str
    form: Form
    """`"full"` for one file, `"sharded"` for a folder."""
    tensors: list[SavedTensor]
    """The tensors of this rank, each with the shard that this rank writes. For a full checkpoint, rank 0 lists those of
    all ranks."""
    about: dict[str, Any]
    """The fields of the manifest that do not concern its files."""
    is_first_of_stage: bool
    """Whether this rank is the lowest of its pipeline stage."""
    tree: dict[str, Any] = field(default_factory=dict)
    """For a full checkpoint, on rank 0: all entries."""
    objects: dict[TreePath, bytes] = field(default_factory=dict)
    """For a sharded checkpoint, on rank 0: the weights and optimizer states that are not tensors, serialized, and at
    the path `()` the other entries, which are the content of `meta.pt`."""

    @staticmethod
    def prepare(
        checkpoint: Mapping[str, Any],
        path: object,
        form: Form,
        ranks: RankGroup,
        *,
        strategy: str,
        stages: Sequence[int] | None = None,
    ) -> "SaveJob":
        """List what each rank writes. Tensors are not copied. *Collective* over `ranks`.

        Sharded tensors (`DTensor`, `FlatShard`), wherever they are in the checkpoint, are written by the ranks that
        have the shards; everything else is rank 0's, or that of the first rank of each pipeline stage.

        Args:
            checkpoint: the checkpoint in Lightning's format, with full tensors, `DTensor` or `FlatShard`. It is not
                changed.
            path: the path of the file or folder, or the URL, to save to. An existing checkpoint is replaced.
            form: `"full"` for one file, `"sharded"` for a folder.
            ranks: the ranks that save together.
            strategy: the name of the strategy, for the manifest.
            stages: the pipeline stage of each of `ranks`, as in `ParallelDims.stages`; `None` if there is one stage.

        Raises:
            CheckpointError: a value cannot be saved. Raised on all ranks.
        """
        what = f"Saving {path}"
        stages = [0] * ranks.world_size if stages is None else stages
        has_stages = len(set(stages)) > 1
        is_first = stages.index(stages[ranks.rank]) == ranks.rank
        tree: dict[str, Any] = {}

        def list_tensors() -> list[SavedTensor]:
            tree.update(by_fqn(checkpoint) if form == "sharded" else checkpoint)
            return tensors_to_save(tree, writes_full=is_first)

        tensors = ranks.run_on_all(what, list_tensors)
        if has_stages:
            tree, tensors = _merge_stages(tree, tensors, ranks, stages, what)
            if form == "full":
                merged, own = tree, tensors
                tensors = ranks.run_on_all(
                    what,
                    lambda: tensors_to_save(merged, writes_full=True, is_merged=True) if ranks.is_rank_0 else own,
                )
        about = {
            "form": form,
            "strategy": strategy,
            "world_size": ranks.world_size,
            "epoch": int(checkpoint.get("epoch", 0)),
            "global_step": int(checkpoint.get("global_step", 0)),
        }
        job = SaveJob(str(path), form, tensors, about, is_first)
        if ranks.is_rank_0 and form == "full":
            job.tree = tree
        elif form == "sharded":
            job.objects = ranks.run_on_all(what, lambda: _serialized(tree, has_stages) if ranks.is_rank_0 else {})
        return job

    def stage(self, staging: Staging) -> None:
        """Copy to the host what this rank will write, so that training can continue while `write` runs.

        Raises:
            CheckpointError: saving to the path would delete files that do not belong to a checkpoint.
        """
        self._check_target()
        staging.stage(self.tensors)
        paths = (path for tensor in self.tensors for path in tensor.paths)
        self.tree = host_copy(replace_at(self.tree, dict.fromkeys(paths)))

    def write(self, ranks: RankGroup) -> None:
        """Write all files and commit. *Collective* over `ranks`, the ranks that prepared the job.

        Raises:
            CheckpointError: a rank could not write, or saving to the path would delete files that do not belong to a
                checkpoint. Raised on all ranks. An old checkpoint at the path is unchanged.
        """
        started = time.monotonic()
        ranks.run_on_rank_0(f"Saving {self.path}", self._check_target)
        if is_remote(self.path) and self.form == "sharded":
            save_id = ranks.run_on_rank_0(f"Saving {self.path}", lambda: uuid4().hex[:12])
            nbytes = self._write_folder(FsspecStorage(self.path), ranks, save_id)
        else:
            nbytes = self._write_draft(ranks)
        if ranks.is_rank_0:
            _log.info("checkpoint committed: %s, %d bytes, %.1f s", self.path, nbytes, time.monotonic() - started)

    def _check_target(self) -> None:
        folder = self.form == "sharded"
        if not is_remote(self.path):
            check_replaceable(Path(self.path), folder=folder)
        else:
            check_replaceable_at(*file_system(self.path), self.path, folder=folder)

    def _write_draft(self, ranks: RankGroup) -> int:
        """Write next to the target, or a local file for a URL, to which a manifest cannot be appended; then commit.

        Return the size of all files in bytes.
        """
        what = f"Saving {self.path}"
        folder, commit = self.form == "sharded", list[Callable[[], None]]()
        with ExitStack() as stack:

            def begin() -> str:
                if is_remote(self.path):
                    made = tempfile.TemporaryDirectory(prefix="lightning_paral_", ignore_cleanup_errors=True)
                    path = Path(stack.enter_context(made)) / "full.ckpt"
                    commit.append(partial(put_file, path, self.path))
                    return str(path)
                draft = stack.enter_context(AtomicPath(Path(self.path), folder=folder))
                commit.append(draft.commit)
                return str(draft.path)

            path = Path(ranks.run_on_rank_0(what, begin))
            if folder:
                nbytes = self._write_folder(LocalStorage(path), ranks)
            else:
                nbytes = write_full(self.tree, self.tensors, path, ranks, self.about, what)
            ranks.run_on_rank_0(what, lambda: commit[0]())
            return nbytes

    def _write_folder(self, folder: Folder, ranks: RankGroup, save_id: str = "") -> int:
        """Write the files of a sharded checkpoint, the manifest last. Return the size of all files in bytes.

        Args:
            folder: the folder to write to.
            ranks: the ranks that save together.
            save_id: for URLs, a part of the file names that distinguishes them from those of other saves.
        """
        what = f"Saving {self.path}"
        objects = {path: data for path, data in self.objects.items() if path}

        def write_local_shards() -> Any:
            if isinstance(folder, LocalStorage) and not folder.path.is_dir():
                raise CheckpointError(
                    "this rank does not see the folder that rank 0 created. A sharded checkpoint requires a file "
                    "system that all nodes share; checkpoint='full' does not."
                )
            name = f"__{ranks.rank}_0{save_id}.distcp"
            return write_rank_file(folder, name, self.tensors, objects, lists_all=self.is_first_of_stage)

        written = ranks.gather_results(what, write_local_shards)

        def finish() -> int:
            files = {file.name: file.record for file in written}
            contents = {METADATA: make_metadata(written), META: self.objects[()]}
            names = {name: f"{name}-{save_id}" for name in contents} if save_id else {}
            for name, data in contents.items():
                files[names.get(name, name)] = _write(folder, names.get(name, name), data)
            _write(folder, FILE_NAME, Manifest(files=files, names=names, **self.about).to_json().encode())
            if isinstance(folder, FsspecStorage):
                for name, data in contents.items():  # other tools expect the usual names
                    _write(folder, name, data)
                folder.remove_except({*files, *contents, FILE_NAME})
            return sum(record.bytes for record in files.values())

        return ranks.run_on_rank_0(what, finish)


def _serialized(tree: Mapping[str, Any], is_merged: bool) -> dict[TreePath, bytes]:
    """Return the field `objects` of a `SaveJob` for a sharded checkpoint. For `is_merged` see `tensors_to_save`."""
    state = {key: value for key, value in tree.items() if is_state_key(key)}
    values = {path: value for path, value in leaves(state) if not isinstance(value, Tensor)}
    rest = {key: value for key, value in tree.items() if not is_state_key(key)}
    sharded = (path for path, tensor in tensors_in(rest) if is_sharded(tensor) or (is_merged and tensor.is_meta))
    values[()] = replace_at(rest, dict.fromkeys(sharded))
    return {path: serialized(value) for path, value in values.items()}


def _write(folder: Folder, name: str, data: bytes) -> FileRecord:
    with folder.create(name) as file:
        file.write(data)
    return file.record()


# The sharded format: a folder that is an ordinary Distributed Checkpoint, with one file per rank and `meta.pt`
#
# Keys and file names are those of Lightning's `ModelParallelStrategy`. That strategy, torch.distributed.checkpoint and
# `dcp_to_torch_save` can read the folder. Tensors have their full shapes and are stored in chunks.
# `torch.distributed.checkpoint.save` would write the same. It takes up to 1.6 times as long, because it computes a CRC
# of each record and flushes a file only at its end, and in torch 2.13 it keeps all tensors that it copies for a file.


@dataclass(frozen=True)
class WrittenTensor:
    """The chunks of a tensor that one rank has written."""

    paths: tuple[TreePath, ...]
    kind: Kind
    chunks: list[tuple[Chunk, int, int]]
    """Each chunk with its offset and length in the file, in bytes."""


@dataclass(frozen=True)
class WrittenFile:
    """The file that one rank has written."""

    name: str
    record: FileRecord
    tensors: list[WrittenTensor]
    objects: dict[TreePath, tuple[int, int]]
    """Offset and length in bytes of each value that is not a tensor."""


def write_rank_file(
    folder: Folder,
    name: str,
    tensors: Sequence[SavedTensor],
    objects: Mapping[TreePath, bytes],
    *,
    lists_all: bool,
) -> WrittenFile:
    """Write a file with this rank's shards of `tensors`, and with `objects`: serialized values that are not tensors.

    With `lists_all`, the result has also the tensors of which this rank writes nothing, so that none is forgotten.
    """
    written, locations = [], {}
    with folder.create(name) as file:
        for tensor in tensors:
            chunks = []
            for chunk, values in _values(tensor):
                file.pad(_ALIGNMENT)
                offset = file.position
                with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
                    torch.save(values, cast("IO[bytes]", file))
                chunks.append((chunk, offset, file.position - offset))
            if chunks or lists_all:
                written.append(WrittenTensor(tensor.paths, tensor.kind, chunks))
        for path, data in objects.items():
            locations[path] = (file.position, len(data))
            file.write(data)
    return WrittenFile(name, file.record(), written, locations)


def _values(tensor: SavedTensor) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the chunks that this rank writes, each with its values on the host, in a storage that has nothing else."""
    if not tensor.shard.chunks:
        return
    local, start = flat(tensor.shard.values().to("cpu", tensor.dtype)), 0
    for chunk in tensor.shard.chunks:
        yield chunk, alone(local[start : start + chunk.numel]).view(chunk.sizes)
        start += chunk.numel


def make_metadata(written: Sequence[WrittenFile]) -> bytes:
    """Return the content of `.metadata`, given the file of each rank.

    Raises:
        CheckpointError: the chunks of the ranks leave gaps or overlap, because the ranks saved different values.
    """
    state: dict[str, Any] = {}
    kinds: dict[str, list[Kind]] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, TreePath] = {}
    for file in written:
        for path, (offset, length) in file.objects.items():
            key = name_of(path)
            paths[key], state[key] = path, BytesStorageMetadata()
            storage[MetadataIndex(key)] = StorageInfo(file.name, offset, length)
        for tensor in file.tensors:
            shape, dtype = tensor.kind
            for path in tensor.paths:
                key = name_of(path)
                paths[key] = path
                kinds.setdefault(key, []).append(tensor.kind)
                about = state.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), []))
                for chunk, offset, length in tensor.chunks:
                    offsets = torch.Size(chunk.offsets)
                    storage[MetadataIndex(key, offsets, len(about.chunks))] = StorageInfo(file.name, offset, length)
                    about.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
    for key, found in kinds.items():
        check_shards(key, found, [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in state[key].chunks])
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=str(uuid4())),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


# Stages of a pipeline


def _merge_stages(
    tree: dict[str, Any], tensors: Sequence[SavedTensor], ranks: RankGroup, stages: Sequence[int], what: str
) -> tuple[dict[str, Any], list[SavedTensor]]:
    """Return rank 0's `tree` with what only other stages have, and the tensors that no earlier stage has. *Collective*.

    All stages have the same groups of parameters. Where several stages have an entry, that of the first stage is used.
    Of other entries, only the shards that callbacks keep are added.

    Args:
        tree: the checkpoint of this rank.
        tensors: the tensors of this rank.
        ranks: the ranks that save together.
        stages: the pipeline stage of each of `ranks`.
        what: the action, such as "Saving a.ckpt", for error messages.

    Returns:
        tuple[dict[str, Any], list[SavedTensor]]: on rank 0, the merged tree, with tensors on the meta device where only
            other stages have them, and on other ranks an unspecified tree; and what is left of `tensors`.

    Raises:
        CheckpointError: the state of a stage cannot be copied or merged. Raised on all ranks.
    """

    def describe() -> Any:
        if stages.index(stages[ranks.rank]) != ranks.rank:
            return None
        state = {key: value for key, value in tree.items() if is_state_key(key) or key == OTHER_ENTRIES_KEY}
        absent: dict[TreePath, Tensor] = {}
        for tensor in tensors:
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            absent |= dict.fromkeys(tensor.paths, stand_in)
        return absent, None if ranks.is_rank_0 else host_copy(replace_at(state, absent))

    described = ranks.gather_results(what, describe)
    earlier = {path for found in described[: stages.index(stages[ranks.rank])] if found for path in found[0]}
    left = [replace(tensor, paths=tuple(path for path in tensor.paths if path not in earlier)) for tensor in tensors]

    def merge() -> dict[str, Any]:
        merged: dict[str, Any] = replace_at(tree, {})
        for absent, state in filter(None, described[1:]):
            present = {path for path, _ in tensors_in(merged)}
            for path in sorted(absent.keys() - present, key=str):
                if not is_state_key(str(path[0])):  # a shard in the state of a callback
                    _check_names(path)
                    insert(merged, path, absent[path], [0])
            for key in WEIGHT_KEYS & state.keys():  # an extra state is not put together from two
                state[key] = {name: value for name, value in state[key].items() if name not in merged[key]}
            _add_missing(merged, state)
        return merged

    tree = ranks.run_on_all(what, lambda: merge() if ranks.is_rank_0 else tree)
    return tree, [tensor for tensor in left if tensor.paths]


def _check_names(path: TreePath) -> None:
    if not all(isinstance(step, str) for step in path):
        raise CheckpointError(
            f"{name_of(path)} is a shard that only a later stage of the pipeline keeps, in a list or under a number. A "
            "callback must keep such shards in dicts, by names."
        )


def _add_missing(first: Any, second: Any) -> None:
    """Add to nested dicts and lists in `first` the entries of dicts that only `second` has."""
    if isinstance(first, dict):
        for key, value in second.items():
            _add_missing(first.setdefault(key, value), value)
    elif isinstance(first, list):
        for one, other in zip(first, second, strict=False):
            _add_missing(one, other)
