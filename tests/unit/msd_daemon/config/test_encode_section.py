"""`batch.encode` and the strategies of vision-language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job
from msd_daemon.core.ring_plan import stage_spec
from tests.support.media_job import media_job, write_media


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_media(tmp_path)
    return tmp_path


def job_of(*names: str, encode: str = "", **changes: Any) -> dict[str, Any]:
    job = media_job(*names) | changes
    if encode:
        job["batch"] = job["batch"] | {"encode": encode}
    return job


@pytest.mark.parametrize(
    ("strategy", "encode", "wanted"),
    [
        ("balanced", "", "home"),
        ("vlm_backbone", "", "home"),
        ("vlm_backbone", "any", "any"),
        ("vlm_hybrid", "", "any"),
        ("vlm_hybrid", "any", "any"),
    ],
)
def test_the_strategy_says_it_unless_the_job_does(
    folder: Path, strategy: str, encode: str, wanted: str
) -> None:
    job = resolve_job(job_of("text", "pictures", strategy=strategy, encode=encode), folder)
    assert job.batch.encode == wanted
    routes = [
        field.name for field in stage_spec(job, 1, "first", 3).fields if "counts" in field.name
    ]
    assert routes == (["image_send_counts", "image_recv_counts"] if wanted == "any" else [])
    assert not [f for f in stage_spec(job, 1, "last", 3).fields if "image" in f.name]


@pytest.mark.parametrize(
    ("names", "changes", "line"),
    [
        (("text",), {"strategy": "vlm_hybrid"}, 'strategy: "vlm_hybrid": evens out encoders'),
        (("text",), {"encode": "any"}, 'batch.encode: "any": no source has media'),
        (
            ("text", "pictures"),
            {"strategy": "vlm_hybrid", "encode": "home"},
            'batch.encode: "home": strategy vlm_hybrid has media encoded anywhere',
        ),
        (("text", "pictures"), {"encode": "there"}, "batch.encode"),
    ],
)
def test_what_does_not_fit_is_a_fault(
    folder: Path, names: tuple[str, ...], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(JobError) as refused:
        resolve_job(job_of(*names, **changes), folder)
    assert line in refused.value.message
