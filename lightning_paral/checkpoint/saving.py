"""Saving: decide who writes what, write it beside the target, agree, commit."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_paral.checkpoint.commit import Draft
from lightning_paral.checkpoint.files import LocalFolder, is_remote
from lightning_paral.checkpoint.full import write_full
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest, record_bytes
from lightning_paral.checkpoint.optimizer import by_name
from lightning_paral.checkpoint.plan import Entry, plan, stage
from lightning_paral.checkpoint.plan import Path as TreePath
from lightning_paral.checkpoint.ranks import Ranks
from lightning_paral.checkpoint.sharded import META, METADATA, flatten, make_metadata, serialized, write_rank_file
from lightning_paral.errors import CheckpointError

OWN_KEY = "lightning_paral"
"""Where a checkpoint holds what only this package needs: frozen parameters left out, random states."""

Form = Literal["full", "sharded"]


@dataclass
class Save:
    """A checkpoint on its way to `path`. All ranks make the same, and call the same methods."""

    path: str
    form: Form
    tree: dict[str, Any]
    """What is written as tensors where they are, divided among the ranks; for the full form, everything."""
    rest: dict[str, Any]
    """For the sharded form, what goes to `meta.pt`."""
    entries: list[Entry]
    objects: dict[TreePath, bytes]
    about: dict[str, Any]

    @staticmethod
    def prepare(
        checkpoint: Mapping[str, Any], path: object, form: Form, ranks: Ranks, replicated: set[int], strategy: str
    ) -> "Save":
        """Decide who writes what. Nothing is copied yet.

        Args:
            checkpoint: as Lightning dumps it, with tensors whole, DTensors or TensorRuns.
            path: file, folder or URL; what is there is replaced.
            form: one file or a folder.
            ranks: who writes.
            replicated: addresses of weights' storages that are the same on all ranks.
            strategy: for the manifest.
        """
        tree, rest = dict(checkpoint), {}
        if form == "sharded":
            rest, tree = tree, {"state_dict": tree.pop("state_dict", {})}
            for number, state in enumerate(rest.pop("optimizer_states", [])):
                tree[f"optimizer_{number}"] = by_name(state)
        large = {key: tree[key] for key in tree if key in ("state_dict", "optimizer_states") or form == "sharded"}
        entries = plan(large, ranks, replicated)
        objects = {}
        if form == "sharded" and ranks.is_first:
            objects = serialized({p: v for p, v in flatten(large).items() if not isinstance(v, torch.Tensor)})
        about = {
            "form": form,
            "strategy": strategy,
            "world_size": ranks.world_size,
            "epoch": int(checkpoint.get("epoch", 0)),
            "global_step": int(checkpoint.get("global_step", 0)),
        }
        return Save(str(path), form, tree, rest, entries, objects, about)

    def stage(self) -> None:
        """Copy what this rank writes, so that training can go on before it is written."""
        stage(self.entries)

    def write(self, ranks: Ranks) -> None:
        """Write and commit. *Collective*.

        Raises:
            CheckpointError: a rank could not write; on all ranks. What was at `path` is as it was.
        """
        if is_remote(self.path):
            raise CheckpointError(f"{self.path}: remote checkpoints are not there yet.")
        self._write_locally(ranks)

    def _write_locally(self, ranks: Ranks) -> None:
        target = Path(self.path)
        what = f"Saving {target}"
        draft: Draft | None = None

        def begin() -> str:
            nonlocal draft
            draft = Draft(target, folder=self.form == "sharded")
            return str(draft.path)

        try:
            path = Path(ranks.on_first(what, begin))
            if self.form == "full":
                write_full(self.tree, self.entries, path, ranks, self.about)
            else:
                self._write_folder(path, ranks, what)
            ranks.on_first(what, lambda: draft.commit() if draft is not None else None)
            draft = None
        finally:
            if draft is not None:
                draft.discard()

    def _write_folder(self, path: Path, ranks: Ranks, what: str) -> None:
        folder = LocalFolder(path)

        def write_mine() -> Any:
            if not path.is_dir():
                raise CheckpointError(
                    "this rank does not see the folder that rank 0 made. A sharded checkpoint needs a file system that "
                    "all hosts share; checkpoint='full' does not."
                )
            return write_rank_file(folder.create, f"__{ranks.rank}_0.distcp", self.entries, self.objects)

        written = ranks.agree(what, write_mine)

        def finish() -> None:
            files = {file.name: file.record for file in written}
            contents = {METADATA: make_metadata(self.entries, written), META: serialized({(): self.rest})[()]}
            for name, data in contents.items():
                files[name] = record_bytes(data)
            contents[FILE_NAME] = Manifest(files=files, **self.about).to_json().encode()
            for name, data in contents.items():  # the manifest comes last
                with folder.create(name) as file:
                    file.write(data)

        ranks.on_first(what, finish)
