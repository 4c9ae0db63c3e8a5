"""torch.distributed.checkpoint for one process among several, which each release of torch is asked for differently.

Newer releases take `no_dist`. torch 2.6 decides by whether torch.distributed is initialised, so that its public
functions would communicate with ranks that do not call them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

TAKES_NO_DIST = "no_dist" in inspect.signature(state_dict_saver.save).parameters
ALONE: dict[str, Any] = {"no_dist": True} if TAKES_NO_DIST else {}
"""Arguments of async_save in the only process."""


def save_alone(tensors: Mapping[str, Any], writer: StorageWriter, planner: SavePlanner | None = None) -> None:
    """Writes `tensors` without communication."""
    save: Any = state_dict_saver.save if TAKES_NO_DIST else state_dict_saver._save_state_dict
    save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)


def load_alone(tensors: Mapping[str, Any], reader: StorageReader) -> None:
    """Fills `tensors` in place without communication."""
    load: Any = state_dict_loader.load if TAKES_NO_DIST else state_dict_loader._load_state_dict
    load(dict(tensors), storage_reader=reader, no_dist=True)
