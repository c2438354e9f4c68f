"""Writes shards with the peers' own writers; run by their interpreter: FOLDER, then what to write."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import peer_rows as rows

MDS_COMPRESSIONS = ("none", "zstd:3", "gz", "bz2", "br:5", "snappy")


def mds_writer() -> Any:
    """Return MosaicML's writer without what its packages import beside: trainers, vision, clouds."""
    root = os.path.dirname(importlib.util.find_spec("streaming").origin)
    for name, folder in (("streaming", root), ("streaming.base", f"{root}/base")):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    from streaming.base.format.mds.writer import MDSWriter

    return MDSWriter


def write_mds(folder: Path) -> None:
    from PIL import Image

    writer = mds_writer()
    for compression in MDS_COMPRESSIONS:
        out = folder / compression.partition(":")[0]
        options = {"compression": None if compression == "none" else compression}
        hashes = ["sha1", "xxh64"] if compression != "gz" else ["sha256"]
        with writer(
            columns=rows.MDS_COLUMNS, out=str(out), hashes=hashes, size_limit=20_000, **options
        ) as out_file:
            for n in range(50):
                row = rows.mds_row(n)
                out_file.write({**row, "pixels": Image.fromarray(row["pixels"])})
    with writer(columns={"x": "pkl", "y": "int"}, out=str(folder / "pickled")) as out_file:
        out_file.write({"x": {1, 2}, "y": 3})


def write_litdata(folder: Path) -> None:
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    def as_tensors(row: dict[str, Any]) -> dict[str, Any]:
        return {
            key: torch.from_numpy(value)
            if isinstance(value, np.ndarray) and key[0] == "t"
            else value
            for key, value in row.items()
        }

    def write(name: str, items: list[Any], chunk_size: int, **options: Any) -> None:
        writer = BinaryWriter(str(folder / name), chunk_size=chunk_size, **options)
        for number, item in enumerate(items):
            writer[number] = item
        writer.done()
        writer.merge()

    flat = [as_tensors(rows.litdata_row(n)) for n in range(300)]
    write("plain", flat, 120)
    write("batch", flat, 120, compression="zstd", compression_batch_size=32)
    write("sample", flat, 120, compression="zstd", compression_level="sample")
    write("chunk", flat, 120, compression="zstd", compression_level="chunk")
    nested = [rows.nested_row(n) for n in range(1000)]
    write("rows", nested, 400)
    write("rows_zstd", nested, 400, compression="zstd")
    write("mixed", [as_tensors(rows.mixed_row(n)) for n in range(20)], 7)
    tokens = [torch.arange(n + 1, dtype=torch.int32) for n in range(40)]
    write("tokens", tokens, 200, item_loader=TokensLoader(8))
    write("pickled", [{"x": {1, 2}, "y": n} for n in range(4)], 10)


def write_datasets(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list([rows.dataset_row(n) for n in range(3000)])
    made.save_to_disk(str(folder / "saved"), num_shards=3)
    made.shuffle(seed=1).save_to_disk(str(folder / "shuffled"))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(folder / "splits"))
    images = [{"bytes": b"x" * n, "path": f"{n}.jpg"} if n else None for n in range(10)]
    features = datasets.Features(
        {"id": datasets.Value("int64"), "image": datasets.Image(decode=False)}
    )
    table = {"id": list(range(10)), "image": images}
    pictures = datasets.Dataset.from_dict(table, features=features)
    pictures.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    pictures.save_to_disk(str(folder / "pictures"))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    {"mds": write_mds, "litdata": write_litdata, "datasets": write_datasets}[sys.argv[2]](target)
