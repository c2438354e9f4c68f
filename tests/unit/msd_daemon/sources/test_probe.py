"""What a probe measures of a source, and that it is kept by what the cost depends on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.model.job import BatchRule, ResolvedJob, ShuffleRule
from federation.model.recipe import SampleRecipe
from federation.model.source_profile import SourceProfile, bound_of, profile_fingerprint
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.sources.probe import ProbeLimits, probe_source
from msd_daemon.sources.profile_store import FOLDER, ProfileStore
from tests.support.metadata import make_job
from tests.support.sources import byte_tokenizer, make_spec
from tests.support.user_code import user_call

SHORT = ProbeLimits(records=64, measure_s=0.2)
PROFILE = SourceProfile("0" * 32, "probe", 9, 8, 700, 4000, 3200, 1000, 200, 300, 1 << 20)


def written(folder: Path, records: int = 3000) -> Path:
    path = folder / "s.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " * 50}) + "\n" for n in range(records)))
    return path


def job_of(path: Path, **changes: Any) -> ResolvedJob:
    spec = make_spec([path], name="s", **changes)
    return make_job([spec], BatchRule(rows=4, row_tokens=256))


def opened(wait: Callable[[], object]) -> Callable[..., SourceLoader]:
    """Return what opens loaders each of whose chunks waits first."""

    def open_loader(*arguments: Any) -> SourceLoader:
        loader = open_source_loader(*arguments)
        own = loader._next_chunk

        def waiting(payload_bytes_max: int) -> Any:
            wait()
            return own(min(payload_bytes_max, 1000))

        loader._next_chunk = waiting  # type: ignore[method-assign]
        return loader

    return open_loader


def test_counts_are_of_what_was_read(tmp_path: Path):
    job = job_of(written(tmp_path))
    profile = probe_source(job, 0, byte_tokenizer(), limits=SHORT)
    assert profile.origin == "probe"
    assert profile.fingerprint == profile_fingerprint(job, 0)
    assert 0 < profile.samples == profile.records
    assert 100 < profile.tokens / profile.samples < 300
    assert profile.cpu_ns > 0
    assert profile.user_ns == 0
    assert profile.chunk_bytes >= profile.tokens
    assert profile.read_bytes > profile.tokens


def test_a_source_that_ends_with_its_first_chunk_is_measured_by_that(tmp_path: Path):
    job = job_of(written(tmp_path, 2), max_epochs=1)
    profile = probe_source(job, 0, byte_tokenizer(), limits=SHORT)
    assert (profile.records, profile.samples) == (2, 2)
    assert profile.is_measured


def test_a_source_without_samples_is_not_measured(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n" * 500)
    profile = probe_source(job_of(path, max_epochs=1), 0, byte_tokenizer(), limits=SHORT)
    assert profile.samples == 0
    assert not profile.is_measured


def test_time_of_the_users_code_stands_apart(tmp_path: Path):
    call = user_call(
        tmp_path / "code",
        "import time\ndef fn(sample, rng):\n    time.sleep(0.005)\n    return sample\n",
    )
    job = job_of(written(tmp_path), recipe=SampleRecipe(transform=call))
    profile = probe_source(job, 0, byte_tokenizer(), limits=SHORT._replace(records=12))
    assert bound_of(profile) == "transform"
    assert profile.user_ns >= profile.samples * 5_000_000
    assert profile.pair_ppm == 0, "two readers are tried where reads are waited for"


def test_waiting_that_two_readers_share_is_told_from_waiting_that_they_do_not(tmp_path: Path):
    blocks = ShuffleRule(block_bytes=1 << 15)
    job, pause = job_of(written(tmp_path), shuffle=blocks), threading.Event()
    apart = probe_source(
        job, 0, byte_tokenizer(), limits=SHORT, open_loader=opened(lambda: pause.wait(0.01))
    )
    assert bound_of(apart) == "read"
    assert apart.pair_ppm > 1_500_000
    one_at_a_time = threading.Lock()

    def queue() -> None:
        with one_at_a_time:
            pause.wait(0.01)

    shared = probe_source(job, 0, byte_tokenizer(), limits=SHORT, open_loader=opened(queue))
    assert bound_of(shared) == "read"
    assert 0 < shared.pair_ppm < 1_500_000


def test_profiles_are_kept_and_joined(tmp_path: Path):
    store = ProfileStore(tmp_path / "state")
    assert store.load(PROFILE.fingerprint) is None
    assert store.add(PROFILE) == PROFILE
    live = replace(PROFILE, origin="live", records=1000, open_bytes=0)
    assert store.add(live) == replace(live, open_bytes=1 << 20)
    assert ProfileStore(tmp_path / "state").load(PROFILE.fingerprint) == store.load(
        PROFILE.fingerprint
    )
    assert [path.name for path in (tmp_path / "state" / FOLDER).iterdir()] == [f"{'0' * 32}.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 60_000, '{"fingerprint": "0"}', "\x00"])
def test_a_damaged_profile_is_as_good_as_none(tmp_path: Path, content: str):
    store = ProfileStore(tmp_path)
    store.add(PROFILE)
    path = tmp_path / FOLDER / f"{PROFILE.fingerprint}.json"
    path.write_text(content)
    assert store.load(PROFILE.fingerprint) is None
    assert store.add(PROFILE) == PROFILE


def test_another_sources_profile_under_a_name_is_not_taken(tmp_path: Path):
    store = ProfileStore(tmp_path)
    store.add(PROFILE)
    path = tmp_path / FOLDER / f"{PROFILE.fingerprint}.json"
    path.rename(path.with_name(f"{'1' * 32}.json"))
    assert store.load("1" * 32) is None


def test_a_folder_that_cannot_be_written_to_is_no_fault(tmp_path: Path):
    (tmp_path / FOLDER).write_text("a file")
    assert ProfileStore(tmp_path).add(PROFILE) == PROFILE


def test_paces_are_kept_beside_profiles(tmp_path: Path):
    store = ProfileStore(tmp_path / "state")
    assert store.load_pace("k" * 32) == 0
    store.save_pace("k" * 32, 1234)
    assert store.load_pace("k" * 32) == 1234
    for content in ('{"step_ns": -1}', '{"step_ns": "x"}', "[]", ""):
        (tmp_path / "state" / FOLDER / f"pace-{'k' * 32}.json").write_text(content)
        assert store.load_pace("k" * 32) == 0
