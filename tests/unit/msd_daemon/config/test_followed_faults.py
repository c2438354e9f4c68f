"""A fault of a job is told once: what only follows from it is not told beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job


def faults_of(folder: Path, source: dict[str, Any], **keys: Any) -> list[str]:
    job = {
        "tokenizer": {"bytes": True},
        "sources": {"web": {"paths": "a.parquet"} | source},
        "batch": {
            "rows": 2,
            "row_tokens": 64,
            "microbatch_patches": 4096,
            "microbatch_frames": 4096,
        },
    }
    columns = ("caption", "image", "audio", "video", "messages")
    pq.write_table(pa.table({name: ["x"] for name in columns}), folder / "a.parquet")
    with pytest.raises(JobError) as raised:
        resolve_job(job | keys, folder, "job", folder / "store")
    return list(raised.value.faults)


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_a_faulty_step_is_not_called_missing_too(tmp_path: Path, modality: str) -> None:
    source = {"text": "caption", modality: modality}
    (fault,) = faults_of(tmp_path, source, **{modality: ["decod"]})
    assert fault.startswith(f'{modality}[0]: "decod": is no step')


def test_a_modality_without_steps_is_told(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"text": "caption", "image": "image"})
    assert fault.startswith("image: (nothing): sources have it, and no steps say")


def test_messages_without_a_template_say_nothing_of_a_column_text(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"messages": "messages"})
    assert fault == (
        'sources.web.messages: "messages": there is no chat template: the tokenizer\'s folder has '
        "none; write chat: {template: FILE}"
    )


def test_two_contents_show_what_was_written(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"text": "caption", "template": "Q: {caption}"})
    assert fault == (
        'sources.web.template: "Q: {caption}": the source gives template and text, a sample is made '
        "of one of them; keep one"
    )
