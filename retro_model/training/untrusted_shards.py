"""Reader of `torch.distributed.checkpoint` shards that runs no code in them.

Torch's own reader unpickles `.metadata` and every value that is not a tensor.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata

from retro_model.base import disk

METADATA = ".metadata"


class _Unpickler(pickle.Unpickler):
    """Unpickler of torch's metadata records, sizes and types of tensors; it knows no other class or function."""

    def find_class(self, module: str, name: str):
        if module in (metadata.__name__, filesystem.__name__) and "." not in name:
            found = getattr(metadata if module == metadata.__name__ else filesystem, name, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        elif (module, name) == ("torch", "Size"):
            return torch.Size
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return {str(torch.strided): torch.strided}.__getitem__
        elif module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        elif module.startswith("pathlib") and name.endswith("Path"):  # the path of the save, which is not used
            return PurePosixPath
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


class Reader(FileSystemReader):
    """Reader of a folder of shards that opens only the named files.

    folder: of the shards.
    files: names of the files to read.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self.folder, self.files = folder, files

    def read_metadata(self, *_, **__):
        """Return the metadata. Raises: ValueError, pickle.UnpicklingError for content that no save writes."""
        found = _Unpickler(io.BytesIO(disk.read_plain(self.folder / METADATA))).load()
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError(f"{METADATA} is no metadata of a checkpoint")
        for place in found.storage_data.values():
            if getattr(place, "relative_path", None) not in self.files:
                raise ValueError(f"{METADATA} names a file that is none of the checkpoint")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class Planner(DefaultLoadPlanner):
    """Load planner that reads numbers, strings and tensors; torch's own unpickles any object."""

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
