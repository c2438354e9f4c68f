"""Folders that Hugging Face datasets' `save_to_disk` made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path
from msd_daemon.stores.data_path import P

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_JSON_BYTES_MAX = 64 << 20


def dataset_shards(folder: P) -> list[P] | None:
    """Return the shards of a saved dataset in its own order, None where the folder is none.

    Raises:
        ConfigError: It holds several splits, rows are chosen by an indices mapping, or what says
            so cannot be read.
    """
    splits = _load(folder / _SPLITS)
    if splits is not None:
        return _one_split(folder, splits)
    state = _load(folder / _STATE)
    if state is None or "_data_files" not in state:
        return None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(
            f"{folder} is a dataset whose rows are chosen by an indices mapping (indices.arrow): "
            "save it anew after dataset.flatten_indices()",
            path=str(folder),
        )
    return [folder / _file_name(folder, entry) for entry in _listed(folder, state)]


def _one_split(folder: P, splits: dict[str, Any]) -> list[P] | None:
    names = splits.get("splits")
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise ConfigError(f"{folder / _SPLITS} names no splits", path=str(folder))
    if len(names) != 1:
        raise ConfigError(
            f"{folder} holds the splits {', '.join(names)}: name the folder of one, "
            f"{folder / names[0] if names else folder / 'train'} say",
            path=str(folder),
        )
    return dataset_shards(folder / names[0])


def _listed(folder: P, state: dict[str, Any]) -> list[Any]:
    files = state["_data_files"]
    if not isinstance(files, list):
        raise ConfigError(f"{folder / _STATE} lists no data files", path=str(folder))
    return files


def _file_name(folder: P, entry: Any) -> str:
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not _is_name(name):
        raise ConfigError(
            f"{folder / _STATE} lists {entry!r}, which is no file of this folder", path=str(folder)
        )
    assert isinstance(name, str)
    return name


def _is_name(name: object) -> bool:
    """Tell whether a name stays in its folder."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return Path(name).name == name and "\0" not in name


def _load(path: P) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        file = open_path(str(path), ReadMeter())
        try:
            if file.size_bytes > _JSON_BYTES_MAX:
                raise ConfigError(f"{path} is over {_JSON_BYTES_MAX} bytes", path=str(path))
            value = json.loads(file.read_at(0, file.size_bytes))
        finally:
            file.close()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error
    return value if isinstance(value, dict) else None
