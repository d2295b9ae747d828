"""Save a checkpoint: plan which rank writes what, write next to the target, agree on success, commit by a rename.

The steps of a save, with the files to read:

1. `weights.py`, `sharded_state.py`: the strategy collects this rank's shards before it calls this module.
2. `save_plan.py`, `shards.py`: decide which elements this rank writes.
3. `formats/sharded.py` or `formats/full.py`: write them, into a new folder or file next to the target.
4. `manifest.py`: rank 0 writes the manifest after all ranks have succeeded.
5. `io/atomic.py`: rename the new folder or file to the target.
"""

import io
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from lightning_paral.checkpoint.formats.full import write_full
from lightning_paral.checkpoint.formats.sharded import (
    META,
    METADATA,
    flatten,
    make_metadata,
    serialize_values,
    write_rank_file,
)
from lightning_paral.checkpoint.io.atomic import AtomicPath
from lightning_paral.checkpoint.io.files import record_bytes
from lightning_paral.checkpoint.io.staging import Staging, copy_to_host
from lightning_paral.checkpoint.io.storage import Folder, FsspecStorage, LocalStorage
from lightning_paral.checkpoint.io.urls import file_system, is_remote, put_file
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest
from lightning_paral.checkpoint.optimizer_state import OTHER_ENTRIES_KEY, other_entries, to_fqn_keys
from lightning_paral.checkpoint.ownership import check_replaceable, check_replaceable_at
from lightning_paral.checkpoint.safe_load.unpickle import warn_about_refused_types
from lightning_paral.checkpoint.save_plan import WriteItem, plan_save
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.stages import merge_stages, restore_int_keys
from lightning_paral.checkpoint.tree import WEIGHT_KEYS, TreePath, is_state_key, replace_at, tensors_in
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError
from lightning_paral.options import Form

_log = logging.getLogger(__name__)


@dataclass
class SaveJob:
    """A checkpoint to write to `path`. All ranks prepare the same job and call the same methods."""

    path: str
    form: Form
    """`"full"` for one file, `"sharded"` for a folder."""
    tree: dict[str, Any]
    """For a full checkpoint, all entries; for a sharded one, weights and optimizer states. Rank 0 writes it."""
    rest: dict[str, Any]
    """For a sharded checkpoint, the other entries: the content of `meta.pt`."""
    items: list[WriteItem]
    """The tensors, each with the shard that this rank writes."""
    objects: dict[TreePath, bytes]
    """For a sharded checkpoint, on rank 0: the values in `tree` that are not tensors, serialized."""
    about: dict[str, Any]
    """The fields of the manifest that do not concern its files."""
    is_first_of_run: bool = True
    """Whether to check for types that loading will refuse. Later saves of a run contain the same types."""

    @staticmethod
    def prepare(
        checkpoint: Mapping[str, Any],
        path: object,
        form: Form,
        ranks: RankGroup,
        replicated: set[int],
        strategy: str,
        averages_later: bool = False,
        stages: Sequence[int] | None = None,
    ) -> "SaveJob":
        """Decide which rank writes what. Tensors are not copied. *Collective* over `ranks`.

        Args:
            checkpoint: the checkpoint in Lightning's format, with full tensors, `DTensor` or `FlatShard`. It is not
                changed.
            path: the path of the file or folder, or the URL, to save to. An existing checkpoint is replaced.
            form: `"full"` for one file, `"sharded"` for a folder.
            ranks: the ranks that save together.
            replicated: the addresses of the storages of weights that are equal on all ranks that have them.
            strategy: the name of the strategy, for the manifest.
            averages_later: whether replicas may differ because the weights are averaged only from time to time.
            stages: the pipeline stage of each of `ranks`, see `plan_save`; `None` if there is one stage.

        Raises:
            CheckpointError: ranks have different tensors, or a value cannot be saved. Raised on all ranks.
        """
        what = f"Saving {path}"
        has_stages = stages is not None and len(set(stages)) > 1
        by_fqn = form == "sharded" or has_stages  # stages number their parameters independently
        tree = _with_fqn_keys(checkpoint) if by_fqn else dict(checkpoint)
        items = plan_save(
            _without_extra_states(tree) if form == "sharded" else tree,
            ranks,
            replicated,
            stages=stages,
            averages_later=averages_later,
            what=what,
        )
        if stages is not None and has_stages:
            tree = merge_stages(tree, items, ranks, stages, what)
        rest: dict[str, Any] = {}
        objects: dict[TreePath, bytes] = {}
        if form == "sharded":
            tree, rest, objects = ranks.run_on_all(what, lambda: _split(tree, items, with_objects=ranks.is_rank_0))
        elif has_stages:
            tree = ranks.run_on_all(what, lambda: restore_int_keys(tree, items) if ranks.is_rank_0 else {})
        about = {
            "form": form,
            "strategy": strategy,
            "world_size": ranks.world_size,
            "epoch": int(checkpoint.get("epoch", 0)),
            "global_step": int(checkpoint.get("global_step", 0)),
        }
        return SaveJob(str(path), form, tree, rest, items, objects, about)

    def stage(self, staging: Staging) -> None:
        """Copy to the host what this rank will write, so that training can continue while `write` runs.

        Raises:
            CheckpointError: saving to the path would delete files that do not belong to a checkpoint.
        """
        self._check_target()
        staging.stage(self.items)
        paths = (path for item in self.items for path in (item.path, *item.aliases))
        self.tree, self.rest = copy_to_host((replace_at(self.tree, dict.fromkeys(paths)), self.rest))

    def write(self, ranks: RankGroup) -> None:
        """Write all files and commit. *Collective* over `ranks`, the ranks that prepared the job.

        Raises:
            CheckpointError: a rank could not write, or saving to the path would delete files that do not belong to a
                checkpoint. Raised on all ranks. An old checkpoint at the path is unchanged.
        """
        started = time.monotonic()
        ranks.run_on_rank_0(f"Saving {self.path}", self._check_target)
        if not is_remote(self.path):
            nbytes = self._write_locally(ranks)
        elif self.form == "sharded":
            save_id = ranks.run_on_rank_0(f"Saving {self.path}", lambda: uuid4().hex[:12])
            nbytes = self._write_folder(FsspecStorage(self.path), ranks, save_id)
        else:
            nbytes = self._upload(ranks)
        if ranks.is_rank_0:
            _log.info("checkpoint committed: %s, %d bytes, %.1f s", self.path, nbytes, time.monotonic() - started)

    def _check_target(self) -> None:
        folder = self.form == "sharded"
        if not is_remote(self.path):
            check_replaceable(Path(self.path), folder=folder)
        else:
            check_replaceable_at(*file_system(self.path), self.path, folder=folder)

    def _write_locally(self, ranks: RankGroup) -> int:
        """Write next to the target, and rename the result to the target. Return the size of all files in bytes."""
        target = Path(self.path)
        what = f"Saving {target}"
        draft: AtomicPath | None = None

        def begin() -> str:
            nonlocal draft
            draft = AtomicPath(target, folder=self.form == "sharded")
            return str(draft.path)

        try:
            path = Path(ranks.run_on_rank_0(what, begin))
            if self.form == "full":
                nbytes = write_full(self.tree, self.items, path, ranks, self.about, what)
                ranks.run_on_rank_0(what, lambda: self._check_types(path))
            else:
                nbytes = self._write_folder(LocalStorage(path), ranks)
            ranks.run_on_rank_0(what, lambda: draft.commit() if draft is not None else None)
            draft = None
            return nbytes
        finally:
            if draft is not None:
                draft.discard()

    def _check_types(self, *files: Any) -> None:
        """In the first save of a run, warn about types that loading will refuse."""
        if self.is_first_of_run:
            for file in files:
                warn_about_refused_types(file)

    def _upload(self, ranks: RankGroup) -> int:
        """Write a local file, because ranks cannot write parts of a file at a URL, and upload it. Return its size."""
        what = f"Saving {self.path}"
        folder = ranks.run_on_rank_0(what, lambda: tempfile.mkdtemp(prefix="lightning_paral_"))
        try:
            path = Path(folder) / "full.ckpt"
            nbytes = write_full(self.tree, self.items, path, ranks, self.about, what)
            ranks.run_on_rank_0(what, lambda: self._check_types(path))
            ranks.run_on_rank_0(what, lambda: put_file(path, self.path))
            return nbytes
        finally:
            if ranks.is_rank_0:
                shutil.rmtree(folder, ignore_errors=True)

    def _write_folder(self, folder: Folder, ranks: RankGroup, save_id: str = "") -> int:
        """Write the files of a sharded checkpoint, the manifest last. Return the size of all files in bytes.

        Args:
            folder: the folder to write to.
            ranks: the ranks that save together.
            save_id: for URLs, a part of the file names that distinguishes them from those of other saves.
        """
        what = f"Saving {self.path}"

        def write_local_shards() -> Any:
            if isinstance(folder, LocalStorage) and not folder.path.is_dir():
                raise CheckpointError(
                    "this rank does not see the folder that rank 0 created. A sharded checkpoint requires a file "
                    "system that all nodes share; checkpoint='full' does not."
                )
            return write_rank_file(folder.create, f"__{ranks.rank}_0{save_id}.distcp", self.items, self.objects)

        written = ranks.gather_results(what, write_local_shards)

        def finish() -> int:
            files = {file.name: file.record for file in written}
            contents = {METADATA: make_metadata(self.items, written), META: serialize_values({(): self.rest})[()]}
            self._check_types(*map(io.BytesIO, (contents[META], *self.objects.values())))
            names = {name: f"{name}-{save_id}" for name in contents} if save_id else {}
            for name, data in contents.items():
                files[names.get(name, name)] = record_bytes(data)
                _write(folder, names.get(name, name), data)
            _write(folder, FILE_NAME, Manifest(files=files, names=names, **self.about).to_json().encode())
            if isinstance(folder, FsspecStorage):
                for name, data in contents.items():  # other tools expect the usual names
                    _write(folder, name, data)
                folder.remove_except({*files, *contents, FILE_NAME})
            return sum(record.bytes for record in files.values())

        return ranks.run_on_rank_0(what, finish)


def _with_fqn_keys(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with an entry `optimizer_0`, ... for each optimizer, with its state keyed by FQN."""
    tree = dict(checkpoint)
    states = tree.pop("optimizer_states", [])
    tree |= {f"optimizer_{number}": to_fqn_keys(state) for number, state in enumerate(states)}
    others = [other_entries(state) for state in states]
    if any(others):
        tree[OTHER_ENTRIES_KEY] = others
    tree.setdefault("state_dict", {})
    return tree


def _without_extra_states(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` without extra states of modules: values that are saved as one object, even if they have tensors."""

    def is_extra_state(value: Any) -> bool:
        return not isinstance(value, Tensor) and not any(is_sharded(tensor) for _, tensor in tensors_in(value))

    kept = dict(tree)
    for key in WEIGHT_KEYS:
        if key in tree:
            kept[key] = {name: value for name, value in tree[key].items() if not is_extra_state(value)}
    return kept


def _split(
    tree: Mapping[str, Any], items: list[WriteItem], *, with_objects: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[TreePath, bytes]]:
    """Return the fields `tree`, `rest` and `objects` of a `SaveJob`. Without `with_objects`, `objects` is empty."""
    paths = {path for item in items for path in (item.path, *item.aliases)}
    rest = {key: value for key, value in tree.items() if not is_state_key(key)}
    state = {key: value for key, value in tree.items() if is_state_key(key)}
    extra_states: dict[TreePath, Any] = {}
    planned = {path[:2] for path in paths}
    for key in WEIGHT_KEYS:
        for name in [name for name in state.get(key, ()) if (key, name) not in planned]:
            extra_states[key, name] = state[key][name]
        if key in state:
            state[key] = {name: value for name, value in state[key].items() if (key, name) in planned}
    objects: dict[TreePath, bytes] = {}
    if with_objects:
        leaves = {path: value for path, value in flatten(state).items() if not isinstance(value, Tensor)}
        objects = serialize_values(leaves | extra_states)
    return state, replace_at(rest, dict.fromkeys(paths)), objects


def _write(folder: Folder, name: str, data: bytes) -> None:
    with folder.create(name) as file:
        file.write(data)
