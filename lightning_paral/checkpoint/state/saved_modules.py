"""Refuse parts of the module inside other entries of a checkpoint: ranks may hold only shards of their parameters."""

import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy
from torch import Tensor, TypedStorage, UntypedStorage
from torch.nn import Module

from lightning_paral.checkpoint.tree import is_state_key
from lightning_paral.model.engine_attributes import describes_shards


def fault_of_entries(checkpoint: Mapping[str, Any], module: Module) -> str:
    """Return which entry refers to a part of `module` that has parameters, or hooks of ZeRO stage 3; "" if none does.

    `self.save_hyperparameters()` records networks that are arguments of the LightningModule, and `on_save_checkpoint`
    may add any module, or objects that refer to one. Losses and metrics without parameters may be saved.

    Args:
        checkpoint: the checkpoint in Lightning's format.
        module: the LightningModule, whose parameters an engine has sharded.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for key, value in checkpoint.items():
        in_hparams = key == "hyper_parameters" and isinstance(value, Mapping)
        for name, entry in value.items() if in_hparams else () if is_state_key(key) else ((key, value),):
            for part in _modules_in(entry):
                if own.intersection(map(id, part.parameters())):
                    fault, other = "whose parameters this strategy shards, and saves in state_dict", "paral_ddp"
                elif any(map(describes_shards, vars(part))):
                    fault, other = "in which ZeRO stage 3 has hooks that cannot be saved", "paral_fsdp"
                else:
                    continue
                where = f"The hyper-parameter {name!r}" if in_hparams else f"The entry {name!r} of the checkpoint"
                remedy = f"Call self.save_hyperparameters(ignore=[{name!r}])" if in_hparams else "Leave it out"
                return f"{where} refers to {type(part).__name__}, {fault}. {remedy}, or use {other}."
    return ""


def _modules_in(entry: Any) -> list[Module]:
    """Return the modules to which `entry` refers, also inside other objects."""
    finder = _Finder(io.BytesIO(), protocol=4)
    finder.found = []
    with suppress(Exception):  # an entry that cannot be pickled is an error of the save
        finder.dump(entry)
    return finder.found


class _Finder(pickle.Pickler):
    found: list[Module]

    def persistent_id(self, obj: Any) -> Any:
        return id(obj) if isinstance(obj, Tensor | numpy.ndarray | UntypedStorage | TypedStorage) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Module):
            self.found.append(obj)
        return NotImplemented
