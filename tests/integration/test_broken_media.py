"""Every handed image, sound and video, good and broken, and every broken container of them: one job.

Which files are refused stands in `test_media_files` and broken/README.md; here they pass through a
whole node: each is a sample or a named, counted drop, the rest of its shard survives, no worker dies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.state import DELIVERED_SAMPLES, DROPPED_COLUMNS, StreamState
from msd_daemon.config.resolve import resolve_job
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.media_pipeline import open_pipeline
from tests.integration.test_media_files import (
    BROKEN_IMAGES,
    BROKEN_SOUNDS,
    BROKEN_VIDEOS,
    EMPTY_VIDEOS,
    OTHER_SOUNDS,
    REFUSED_IMAGES,
    names,
)
from tests.support.media_oracle import unit_digest
from tests.support.node import Node, run_ranks, running_node
from tests.support.sources import DATA, needs_data

pytestmark = [needs_data, pytest.mark.processes]

BROKEN = DATA / "broken"
WORKERS = 2
WORKER_ANONYMOUS_MIB = 400
"""Budget of a loader worker: a picture of 32 Mpx takes 96 MiB, and as much again to be resized."""
PLACEHOLDERS = {"image": 300, "video": 301, "audio": 302}

CONTAINERS: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "tar_bad_header": ({"paths": "fsdd_badheader.tar"}, 79, {"unreadable": 1}),
    "tar_concatenated": ({"paths": "fsdd_concatenated.tar"}, 80, {"field_missing": 100}),
    "tar_cut": ({"paths": "fsdd_cut.tar"}, 45, {"unreadable": 1}),
    "tar_no_end": ({"paths": "fsdd_no_eof_blocks.tar"}, 80, {}),
    "mds_truncated": ({"paths": "mds_truncated_shard"}, 480, {"unreadable": 1}),
    "feather_cut": ({"paths": "moby_cut.feather"}, 40, {"unreadable": 1}),
}
"""Of `derived`: samples and drops as broken/README.md tells them."""


def files_of(modality: str) -> dict[str, list[Path]]:
    """Return the good files of a modality and the broken ones."""
    folder = {"image": "images", "audio": "audio", "video": "video"}[modality]
    broken = {"image": BROKEN_IMAGES, "audio": BROKEN_SOUNDS, "video": BROKEN_VIDEOS}[modality]
    return {
        "good": [DATA / folder / name for name in names(folder, "")],
        "broken": [BROKEN / name for name in broken],
    }


def is_refused(path: Path) -> bool:
    """Tell whether a file is one that must be dropped."""
    name = path.name
    if path.is_relative_to(BROKEN):
        key = str(path.relative_to(BROKEN))
        outcome = (BROKEN_IMAGES | BROKEN_SOUNDS | BROKEN_VIDEOS)[key]
        return isinstance(outcome, str) or outcome == 0
    return name in REFUSED_IMAGES or name in OTHER_SOUNDS or name in EMPTY_VIDEOS


def write_lists(folder: Path) -> dict[str, list[Path]]:
    """Write a list of paths for each modality, good and broken; return the files of each."""
    lists = {}
    for modality in PLACEHOLDERS:
        for kind, paths in files_of(modality).items():
            lines = [json.dumps({"text": path.name, modality: str(path)}) for path in paths]
            (folder / f"{kind}_{modality}.jsonl").write_text("\n".join(lines) + "\n")
            lists[f"{kind}_{modality}"] = paths
    return lists


def media_job(folder: Path, lists: dict[str, list[Path]]) -> dict[str, Any]:
    sources: dict[str, Any] = {}
    for name in lists:
        modality = name.partition("_")[2]
        sources[name] = {"paths": str(folder / f"{name}.jsonl"), modality: modality}
    for name, (section, _, _) in CONTAINERS.items():
        fields = {"audio": "wav", "text": "json.text"} if name.startswith("tar_") else {}
        sources[name] = section | {"paths": str(BROKEN / "derived" / section["paths"])} | fields
    from tests.support.media_corpus import write_tokenizer

    write_tokenizer(folder / "tokenizer.json", 400)
    return {
        "schema": 1,
        "name": "media",
        "seed": 4,
        "tokenizer": {"file": str(folder / "tokenizer.json"), "eos": 5},
        "image": [
            "decode",
            {"resize": "max_pixels", "max_pixels": 50176},
            {"patchify": "raster", "patch": 14, "merge": 2},
        ],
        "video": [
            "decode",
            {"sample": "count", "count": 8},
            {"resize": "max_pixels", "max_pixels": 50176},
            {"patchify": "raster", "patch": 14, "merge": 2, "temporal": 2},
        ],
        "audio": [
            "decode",
            {"resample": 16000},
            {"window": 10.0, "mode": "cut"},
            {"mel": {"bins": 32, "dtype": "float16"}},
        ],
        "placeholder": {
            "image": {"token": 300},
            "video": {"token": 301},
            "audio": {"token": 302, "tokens": "ceil(frames / 8)"},
        },
        "batch": {
            "rows": 8, "row_tokens": 2048, "microbatch_rows": 2, "microbatch_patches": 8192,
            "microbatch_frames": 8192,
        },
        "defaults": {"on_error": {"policy": "skip", "budget_ratio": 1.0}},
        "sources": sources,
        "epochs": 1,
    }  # fmt: skip


class Delivered:
    """What a pass over all files gave."""

    def __init__(self, node: Node, job: dict[str, Any]) -> None:
        self.names = sorted(job["sources"])
        self.items: Counter[tuple[str, bytes]] = Counter()
        self.anonymous_mib = 0.0
        self.pids: set[int] = set()
        self.state = b""
        self._node = node
        run_ranks(node, job, {"dp": 1}, None, read_step=self._read, at_end=self._end)
        self.log = node.log

    def _read(self, data: Any, step: Any) -> None:
        for batch in step:
            sources = np.asarray(batch.segment_source)
            for modality in PLACEHOLDERS:
                media = batch.media(modality)
                bounds, units = np.asarray(media.cu_seqlens), np.asarray(media.patches)
                for number, segment in enumerate(np.asarray(media.segments).tolist()):
                    own = units[bounds[number] : bounds[number + 1]]
                    self.items[self.names[sources[segment]], unit_digest(own)] += 1
            del batch, media, units
        for child in self._node.children():
            if child.name() == "msd-loader":
                self.pids.add(child.pid)
                status = Path(f"/proc/{child.pid}/status").read_text()
                mib = int(status.partition("RssAnon:")[2].split()[0]) / 1024
                self.anonymous_mib = max(self.anonymous_mib, mib)

    def _end(self, data: Any) -> None:
        self.state = data.train.state_dict()["msd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists")


@pytest.fixture(scope="module")
def lists(folder: Path) -> dict[str, list[Path]]:
    return write_lists(folder)


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, lists: dict[str, list[Path]]
) -> Iterator[Delivered]:
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", str(WORKERS)) as node:
        yield Delivered(node, media_job(folder, lists))


def test_each_file_is_a_sample_or_a_counted_drop(
    done: Delivered, lists: dict[str, list[Path]]
) -> None:
    state = StreamState.decode(done.state)
    found = {}
    for index, name in enumerate(state.source_names):
        counts = zip(DROPPED_COLUMNS, state.dropped[:, index].tolist(), strict=True)
        drops = {reason: count for reason, count in counts if count}
        found[name] = (int(state.progress[DELIVERED_SAMPLES, index]), drops)
    wanted: dict[str, tuple[int, dict[str, int]]] = {
        name: (samples, drops) for name, (_, samples, drops) in CONTAINERS.items()
    }
    for name, paths in lists.items():
        refused = sum(map(is_refused, paths))
        wanted[name] = (len(paths) - refused, {"undecodable": refused} if refused else {})
    assert found == wanted


def test_pixels_and_frames_are_those_of_the_files(
    done: Delivered, folder: Path, lists: dict[str, list[Path]]
) -> None:
    resolved = resolve_job(media_job(folder, lists), folder, store_dir=folder / "store")
    pipelines = {rule.modality: open_pipeline(rule, None) for rule in resolved.media}
    wanted: Counter[tuple[str, bytes]] = Counter()
    for name, paths in lists.items():
        for path in paths:
            try:
                item = pipelines[name.partition("_")[2]](
                    path.read_bytes(), np.random.default_rng(0)
                )
            except MediaError:
                assert is_refused(path), path
                continue
            if len(item.data):
                wanted[name, unit_digest(item.data)] += 1
    assert {key: n for key, n in done.items.items() if key[0] in lists} == wanted


def test_damaged_containers_are_named(done: Delivered) -> None:
    told = [line for line in done.log.splitlines() if " source " in line]
    for name in ("fsdd_badheader.tar", "fsdd_cut.tar", "shard.00000.mds", "moby_cut.feather"):
        assert any(name in line for line in told), name


def test_workers_live_through_it_in_their_memory(done: Delivered) -> None:
    print(f"a worker's anonymous memory {done.anonymous_mib:.0f} MiB at most")
    assert len(done.pids) == WORKERS, "a worker was replaced"
    assert done.anonymous_mib < WORKER_ANONYMOUS_MIB
