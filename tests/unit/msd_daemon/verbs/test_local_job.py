"""Jobs of verbs run by hand: copies of the user's code lie where the daemon keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from msd_client.contract.errors import JobError
from msd_daemon.stores.options import configure_stores, configured_options
from msd_daemon.stores.retry import tell_waits
from msd_daemon.verbs.local_job import resolve_local_job

JOB = """
sources: {a: {paths: a.jsonl, transform: "own:same"}}
tokenizer: {bytes: true}
batch: {rows: 2, row_tokens: 16}
"""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.delenv("MSD_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "own.py").write_text("def same(sample, rng):\n    return sample\n")
    (tmp_path / "job.yaml").write_text(JOB)
    before = configured_options()
    yield tmp_path / "job.yaml"
    configure_stores(before)
    tell_waits(None)


def test_copies_lie_in_the_state_folder_of_the_configuration(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = job.parent / "state"
    written = job.parent / "daemon.toml"
    written.write_text(f'[daemon]\nstate_dir = "{state}"\n')
    monkeypatch.setenv("MSD_CONFIG", str(written))
    resolved, config = resolve_local_job(str(job))
    (source,) = resolved.sources
    assert source.recipe is not None and source.recipe.transform is not None
    assert Path(source.recipe.transform.folder).parent == config.content_dir
    assert config.content_dir.is_relative_to(state)
    assert not (job.parent / "home").exists()


def test_a_missing_file_is_a_fault_of_the_job(job: Path) -> None:
    with pytest.raises(JobError, match="give the path of a job"):
        resolve_local_job(str(job.parent / "none.yaml"))
