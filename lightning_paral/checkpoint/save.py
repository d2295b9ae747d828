"""Saving: decide who writes what, write it beside the target, agree, commit."""

import io
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.checkpoint.formats.full import write_full
from lightning_paral.checkpoint.formats.sharded import (
    META,
    METADATA,
    flatten,
    make_metadata,
    serialized,
    write_rank_file,
)
from lightning_paral.checkpoint.io.atomic import AtomicPath, remove
from lightning_paral.checkpoint.io.checksums import record_bytes
from lightning_paral.checkpoint.io.staging import Staging, copied_to_host
from lightning_paral.checkpoint.io.storage import Folder, FsspecStorage, LocalStorage, file_system, is_remote, put_file
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest
from lightning_paral.checkpoint.ownership import check_replaceable, check_replaceable_at, found_at
from lightning_paral.checkpoint.replicas import find_differing
from lightning_paral.checkpoint.safe_load.unpickle import warn_of_refused
from lightning_paral.checkpoint.save_plan import (
    OF_WEIGHTS,
    TreePath,
    WriteItem,
    check_same,
    is_large,
    plan,
    replace,
    tensors_in,
)
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.optimizer import OTHER_ENTRIES_KEY, other_entries, to_fqn_keys
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError
from lightning_paral.options import Form


@dataclass
class SaveJob:
    """A checkpoint on its way to `path`. All ranks make the same, and call the same methods."""

    path: str
    form: Form
    tree: dict[str, Any]
    """What is written as tensors where they are, divided among the ranks; for the full form, everything."""
    rest: dict[str, Any]
    """For the sharded form, what goes to `meta.pt`."""
    entries: list[WriteItem]
    objects: dict[TreePath, bytes]
    about: dict[str, Any]
    is_first_of_run: bool = True

    @staticmethod
    def prepare(
        checkpoint: Mapping[str, Any],
        path: object,
        form: Form,
        ranks: RankGroup,
        replicated: set[int],
        strategy: str,
        averages_later: bool = False,
    ) -> "SaveJob":
        """Decide who writes what. Nothing is copied yet.

        Args:
            checkpoint: as Lightning dumps it, with tensors whole, DTensors or TensorRuns.
            path: file, folder or URL; what is there is replaced.
            form: one file or a folder.
            ranks: who writes.
            replicated: addresses of weights' storages that are the same on all ranks.
            strategy: for the manifest.
            averages_later: whether weights differ between ranks on purpose, until they are averaged.
        """
        what = f"Saving {path}"
        tree, rest, objects = dict(checkpoint), {}, {}
        if form == "sharded":
            states = tree.pop("optimizer_states", [])
            tree |= {f"optimizer_{number}": to_fqn_keys(state) for number, state in enumerate(states)}
            beside = [other_entries(state) for state in states]
            if any(beside):
                tree[OTHER_ENTRIES_KEY] = beside
            tree.setdefault("state_dict", {})
            extra_states: dict[TreePath, Any] = {}
            for key in OF_WEIGHTS:
                if key in tree:
                    tree[key], extra = _without_extra_states(tree[key], key)
                    extra_states |= extra
        differing = find_differing(tree, ranks, replicated, averages_later, what)
        entries = ranks.each(what, lambda: plan(tree, ranks, replicated, differing))
        check_same(entries, ranks)
        entries.sort(key=lambda entry: entry.part.place)  # what lies together is read together: from NVMe, it is once
        if form == "sharded":
            rest = {key: tree.pop(key) for key in list(tree) if not is_large(key)}
            rest = replace(rest, {where: None for entry in entries for where in (entry.path, *entry.aliases)})

            def serialize() -> dict[TreePath, bytes]:
                leaves = {p: v for p, v in flatten(tree).items() if not isinstance(v, torch.Tensor)}
                return serialized(leaves | extra_states)

            objects = ranks.each(what, lambda: serialize() if ranks.is_first else {})
        about = {
            "form": form,
            "strategy": strategy,
            "world_size": ranks.world_size,
            "epoch": int(checkpoint.get("epoch", 0)),
            "global_step": int(checkpoint.get("global_step", 0)),
        }
        return SaveJob(str(path), form, tree, rest, entries, objects, about)

    def stage(self, staging: Staging) -> None:
        """Copy what this rank writes, so that training can go on before it is written."""
        self._check_target()
        staging.stage(self.entries)
        holes = {path: None for entry in self.entries for path in (entry.path, *entry.aliases)}
        self.tree, self.rest = copied_to_host((replace(self.tree, holes), self.rest))

    def write(self, ranks: RankGroup) -> None:
        """Write and commit. *Collective*.

        Raises:
            CheckpointError: a rank could not write, or what is at `path` is no checkpoint and would be lost; on all
                ranks. What was at `path` is as it was.
        """
        ranks.on_first(f"Saving {self.path}", self._check_target)
        if not is_remote(self.path):
            self._write_locally(ranks)
        elif self.form == "sharded":
            save_id = ranks.on_first(f"Saving {self.path}", lambda: uuid4().hex[:12])
            self._write_folder(FsspecStorage(self.path), ranks, save_id)
        else:
            self._upload(ranks)

    def _check_target(self) -> None:
        folder = self.form == "sharded"
        if not is_remote(self.path):
            check_replaceable(Path(self.path), folder=folder)
        else:
            check_replaceable_at(*file_system(self.path), self.path, folder=folder)

    def _write_locally(self, ranks: RankGroup) -> None:
        target = Path(self.path)
        what = f"Saving {target}"
        draft: AtomicPath | None = None

        def begin() -> str:
            nonlocal draft
            draft = AtomicPath(target, folder=self.form == "sharded")
            return str(draft.path)

        try:
            path = Path(ranks.on_first(what, begin))
            if self.form == "full":
                write_full(self.tree, self.entries, path, ranks, self.about, what)
                ranks.on_first(what, lambda: self._warn_of_types(path))
            else:
                self._write_folder(LocalStorage(path), ranks)
            ranks.on_first(what, lambda: draft.commit() if draft is not None else None)
            draft = None
        finally:
            if draft is not None:
                draft.discard()

    def _warn_of_types(self, *files: Any) -> None:
        if self.is_first_of_run:  # it takes time, and the next ones hold the same types
            for file in files:
                warn_of_refused(file)

    def _upload(self, ranks: RankGroup) -> None:
        # Written to a local file first, for a file behind a URL cannot be written in parts. Closing it commits it.
        what = f"Saving {self.path}"
        folder = ranks.on_first(what, lambda: tempfile.mkdtemp(prefix="lightning_paral_"))
        try:
            path = Path(folder) / "full.ckpt"
            write_full(self.tree, self.entries, path, ranks, self.about, what)
            ranks.on_first(what, lambda: self._warn_of_types(path))
            ranks.on_first(what, lambda: put_file(path, self.path))
        finally:
            if ranks.is_first:
                shutil.rmtree(folder, ignore_errors=True)

    def _write_folder(self, folder: Folder, ranks: RankGroup, save_id: str = "") -> None:
        """Write the files of a folder, its manifest last. With `save_id`, into names that no earlier save has."""
        what = f"Saving {self.path}"

        def write_mine() -> Any:
            if isinstance(folder, LocalStorage) and not folder.path.is_dir():
                raise CheckpointError(
                    "this rank does not see the folder that rank 0 made. A sharded checkpoint needs a file system that "
                    "all hosts share; checkpoint='full' does not."
                )
            return write_rank_file(folder.create, f"__{ranks.rank}_0{save_id}.distcp", self.entries, self.objects)

        written = ranks.agree(what, write_mine)

        def finish() -> None:
            files = {file.name: file.record for file in written}
            contents = {METADATA: make_metadata(self.entries, written), META: serialized({(): self.rest})[()]}
            self._warn_of_types(*map(io.BytesIO, (contents[META], *self.objects.values())))
            names = {name: f"{name}-{save_id}" for name in contents} if save_id else {}
            for name, data in contents.items():
                files[names.get(name, name)] = record_bytes(data)
                _write(folder, names.get(name, name), data)
            _write(folder, FILE_NAME, Manifest(files=files, names=names, **self.about).to_json().encode())
            if isinstance(folder, FsspecStorage):
                for name, data in contents.items():  # for other tools
                    _write(folder, name, data)
                folder.keep({*files, *contents, FILE_NAME})

        ranks.on_first(what, finish)


def _without_extra_states(state_dict: Mapping[str, Any], key: str) -> tuple[dict[str, Any], dict[TreePath, Any]]:
    """Return the tensors of `state_dict`, and by path what modules keep beside: whole, whatever containers it is of."""
    extra = {
        name: value
        for name, value in state_dict.items()
        if not isinstance(value, torch.Tensor) and not any(is_sharded(tensor) for _, tensor in tensors_in(value))
    }
    tensors = {name: value for name, value in state_dict.items() if name not in extra}
    return tensors, {(key, name): value for name, value in extra.items()}


def _write(folder: Folder, name: str, data: bytes) -> None:
    with folder.create(name) as file:
        file.write(data)


def remove_at(path: str) -> None:
    """Remove the checkpoint at a path or URL, if it is there. What is none stays, and a warning says so."""
    if not is_remote(path):
        remove(Path(path))
        return
    fs, name = file_system(path)
    if fs.isfile(name):
        fs.rm_file(name)
    if not fs.isdir(name):
        return
    found = found_at(fs, name)
    if not found.is_checkpoint and not found.is_empty:
        rank_zero_warn(f"{path} is {found.what}, not a checkpoint. It was not removed.")
    elif found.foreign:
        rank_zero_warn(f"{path} was removed but for what is not the checkpoint's: {found.listed}.")
        for file in found.own:  # first what makes it a checkpoint
            fs.rm(f"{name}/{file}", recursive=True)
    else:
        fs.rm(name, recursive=True)
