"""Every handed shard set that is good, in one job, one pass each: rows as its README counts them."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from msd_client.contract.state import (
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DROPPED_COLUMNS,
    StreamState,
)
from tests.support.node import Node, run_ranks, running_node
from tests.support.sources import DATA, needs_data

pytestmark = [needs_data, pytest.mark.processes]

SHARDS = DATA / "shards"
IMAGE, AUDIO = 200018, 199998
"""Ids of o200k_base that no text gives."""
WORKERS = 2
WORKER_ANONYMOUS_MIB = 350
"""Budget of a loader worker: tokenizer (o200k_base 110 MiB), decoders, blocks read ahead."""

ROWS: dict[str, tuple[int, dict[str, int]]] = {
    "asr": (4, {}),
    "audio_wds": (80, {}),
    "bible": (350, {}),
    "cls_tgz": (90, {}),
    "feather": (138, {}),
    "gsm8k": (7473, {}),
    "laion": (1000, {}),
    "litdata": (32, {}),
    "mds_text": (600, {}),
    "mds_vlm": (11, {}),
    "mmc4": (91, {}),
    "nanogpt": (166, {}),  # 338,025 ids in records of 2,048
    "obelics": (91, {}),
    "shakespeare": (7222, {}),
    "sotu": (78, {}),
    "vlm_hf": (27, {"field_missing": 1}),  # row 3 has no image
    "wds_0": (27, {}),
    "wds_1": (30, {}),
    "wds_2": (22, {}),
    # Two without a caption, three whose dotted keys leave no member called jpg or txt; a cut, an
    # empty and a far too large picture.
    "wds_3": (12, {"field_missing": 5, "undecodable": 3}),
}
"""Delivered samples, and drops by reason."""
TEXTS = {
    "feather": ["moby_dick.feather"],
    "gsm8k": ["gsm8k/train.jsonl"],
    "sotu": [f"sotu_hf/data-{number:05}-of-00003.arrow" for number in range(3)],
}
TOKENS = {"bible": 378_190, "shakespeare": 330_807, "nanogpt": 338_025}


def write_images(folder: Path) -> set[str]:
    """Unpack the pictures of the tars by the names that documents call them; return the names."""
    names = set()
    for number in (0, 1):
        with tarfile.open(SHARDS / f"vlm_wds/anthro-00000{number}.tar") as tar:
            members = {member.name: member for member in tar if member.isfile()}
            for name, member in members.items():
                notes = members.get(name.rpartition(".")[0] + ".json")
                if not name.endswith((".jpg", ".png")) or notes is None:
                    continue
                opened, told = tar.extractfile(member), tar.extractfile(notes)
                assert opened is not None and told is not None
                original = Path(json.load(told)["original"]).name
                (folder / original).write_bytes(opened.read())
                names.add(original)
    return names


def sources_of(images: Path) -> dict[str, Any]:
    text, wds = DATA / "text", SHARDS / "vlm_wds"
    any_image = "jpg;png;gif;avif"
    interleaved = {"missing": "leave_out"}
    return {
        "asr": {
            "paths": str(DATA / "audio/asr_manifest.jsonl"), "format": "nemo_manifest",
            "audio": "audio_filepath",
        },
        "audio_wds": {"paths": str(SHARDS / "audio_wds"), "audio": "wav", "text": "json.text"},
        "bible": {"paths": str(SHARDS / "megatron/bible_o200k_text_sentence.bin")},
        "cls_tgz": {
            "paths": str(SHARDS / "webdataset_testdata/sample.tgz"), "image": "png", "text": "cls",
        },
        "feather": {"paths": str(text / "moby_dick.feather")},
        "gsm8k": {"paths": str(text / "gsm8k"), "template": "{question}\n{answer}"},
        "laion": {"paths": str(SHARDS / "laion_meta"), "text": "TEXT"},
        "litdata": {"paths": str(SHARDS / "litdata")},
        "mds_text": {"paths": str(SHARDS / "mds_text")},
        "mds_vlm": {"paths": str(SHARDS / "mds_vlm"), "image": "image", "text": "caption"},
        "mmc4": {
            "paths": str(SHARDS / "interleaved/mmc4_like.jsonl.zst"), "media_root": str(images),
            "interleave": {"text": "text_list", "image": "image_info", "layout": "mmc4"}
            | interleaved,
        },
        "nanogpt": {
            "paths": str(SHARDS / "nanogpt/train.bin"), "format": "token_file", "token_bytes": 2,
        },
        "obelics": {
            "paths": str(SHARDS / "interleaved/obelics_like.parquet"), "media_root": str(images),
            "interleave": {"text": "texts", "image": "images"} | interleaved,
        },
        "shakespeare": {"paths": str(SHARDS / "megatron/shakespeare_r50k_text_document.bin")},
        "sotu": {"paths": str(text / "sotu_hf")},
        "vlm_hf": {"paths": str(SHARDS / "vlm_hf/data"), "image": "image", "text": "caption"},
        "wds_0": {"paths": str(wds / "anthro-000000.tar"), "image": "jpg;png", "text": "txt"},
        "wds_1": {
            "paths": str(wds / "anthro-000001.tar"), "image": "jpg;png", "text": "json.caption",
        },
        "wds_2": {
            "paths": str(wds / "anthro-000002.tar"), "image": "[0-9]*.*g", "text": "json.title",
        },
        "wds_3": {"paths": str(wds / "anthro-000003.tar"), "image": any_image, "text": "txt"},
    }  # fmt: skip


def handed_job(images: Path) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "handed",
        "seed": 9,
        "tokenizer": {"tiktoken": str(DATA / "tokenizers/o200k_base.tiktoken"), "eos": "none"},
        "image": [
            "decode",
            {"resize": "native", "min_pixels": 3136, "max_pixels": 200704},
            {"patchify": "qwen2_vl"},
        ],
        "audio": [
            "decode",
            {"resample": 16000},
            {"window": 30.0, "mode": "cut"},
            {"mel": {"bins": 80, "dtype": "float16"}},
        ],
        "placeholder": {
            "image": {"token": IMAGE},
            "audio": {"token": AUDIO, "tokens": "ceil(ceil(frames / 2) / 4)"},
        },
        "batch": {
            "rows": 16, "row_tokens": 4096, "microbatch_rows": 2, "microbatch_patches": 8192,
            "microbatch_frames": 8192, "positions": "mrope",
        },
        "defaults": {"on_error": {"policy": "skip", "budget_ratio": 0.5}},
        "sources": sources_of(images),
        "epochs": 1,
    }  # fmt: skip


class Pass:
    """One pass over all sources, as two ranks got it."""

    def __init__(self, node: Node, job: dict[str, Any]) -> None:
        self.names = sorted(job["sources"])
        self.tokens: Counter[str] = Counter()
        self.items: Counter[tuple[str, str]] = Counter()
        self.grids: Counter[tuple[int, ...]] = Counter()
        self.steps = 0
        self.anonymous_mib = 0.0
        self.states: list[bytes] = []
        self.pids: set[int] = set()
        self._node = node
        run_ranks(node, job, {"dp": 2}, None, read_step=self._read, at_end=self._end)

    def _read(self, data: Any, step: Any) -> None:
        for batch in step:
            lengths = np.diff(np.asarray(batch.cu_seqlens))
            sources = np.asarray(batch.segment_source)
            for source, length in zip(sources.tolist(), lengths.tolist(), strict=True):
                if source >= 0:
                    self.tokens[self.names[source]] += length
            for modality in ("image", "audio"):
                media = batch.media(modality)
                assert np.isfinite(np.asarray(media.patches, np.float32)).all()
                for segment in np.asarray(media.segments).tolist():
                    self.items[self.names[sources[segment]], modality] += 1
            self.grids.update(map(tuple, np.asarray(batch.media("image").grids).tolist()))
            del batch, media
        if data.rank == 0:
            self.steps += 1
            self._look()

    def _look(self) -> None:
        for child in self._node.children():
            if child.name() == "msd-loader":
                self.pids.add(child.pid)
                status = Path(f"/proc/{child.pid}/status").read_text()
                mib = int(status.partition("RssAnon:")[2].split()[0]) / 1024
                self.anonymous_mib = max(self.anonymous_mib, mib)

    def _end(self, data: Any) -> None:
        self.states.append(data.train.state_dict()["msd"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Pass]:
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", str(WORKERS)) as node:
        yield Pass(node, handed_job(images))


def test_rows_are_those_of_the_readme(done: Pass) -> None:
    state = StreamState.decode(done.states[0])
    assert done.states[1] == done.states[0]
    assert state.ending == "every source of the mixture is exhausted"
    assert not state.carried.shape[1]
    found = {}
    for index, name in enumerate(state.source_names):
        counts = zip(DROPPED_COLUMNS, state.dropped[:, index].tolist(), strict=True)
        drops = {reason: count for reason, count in counts if count}
        found[name] = (int(state.progress[DELIVERED_SAMPLES, index]), drops)
    assert found == ROWS
    delivered = dict(
        zip(state.source_names, state.progress[DELIVERED_TOKENS].tolist(), strict=True)
    )
    assert delivered == dict(done.tokens)


def test_tokens_are_those_of_the_readme(done: Pass) -> None:
    texts = json.loads((DATA / "text/expected.json").read_text())
    wanted = TOKENS | {
        name: sum(texts[corpus]["tokens"]["o200k_base"] for corpus in corpora)
        for name, corpora in TEXTS.items()
    }
    assert {name: done.tokens[name] for name in wanted} == wanted


def test_every_picture_and_sound_is_delivered(done: Pass, images: Path) -> None:
    there = {path.name for path in images.iterdir()}
    table = pq.read_table(SHARDS / "interleaved/obelics_like.parquet", columns=["images"])
    referred = sum(name in there for names in table["images"].to_pylist() for name in names if name)
    assert referred > 20
    with tarfile.open(SHARDS / "vlm_wds/anthro-000002.tar") as tar:
        pictures = sum(member.name.endswith("g") for member in tar)
    wanted = {
        ("asr", "audio"): 4, ("audio_wds", "audio"): 80, ("cls_tgz", "image"): 90,
        ("mds_vlm", "image"): 11, ("mmc4", "image"): referred, ("obelics", "image"): referred,
        ("vlm_hf", "image"): 27, ("wds_0", "image"): 27, ("wds_1", "image"): 30,
        ("wds_2", "image"): pictures, ("wds_3", "image"): 12,
    }  # fmt: skip
    assert dict(done.items) == wanted


def test_workers_live_through_it_in_their_memory(done: Pass) -> None:
    print(f"{done.steps} steps, a worker's anonymous memory {done.anonymous_mib:.0f} MiB at most")
    assert len(done.pids) == WORKERS, "a worker was replaced"
    assert done.anonymous_mib < WORKER_ANONYMOUS_MIB
