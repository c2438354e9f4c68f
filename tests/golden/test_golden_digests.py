"""Stream version 1 is frozen: what eight jobs hold in 100 steps must never change (E3).

A change here is a change of the stream: bump STREAM_VERSION, keep the former loadable or refuse it
by number, and only then write `digests.json` anew (MSD_WRITE_GOLDEN=1).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from federation.model.job import STREAM_VERSION
from tests.support.golden_jobs import GOLDEN_JOBS, job_of
from tests.support.node import Node, run_ranks

STEPS = 100
FILE = Path(__file__).with_name("digests.json")
FIELDS = (
    "tokens", "labels", "position_ids", "cu_seqlens", "cu_seqlens_padded", "segment_source",
    "loss_weights",
)  # fmt: skip
USER_FIELDS = ("advantage", "reward")


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


class Content:
    """Digest of everything that ranks get, field by field, little endian."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Any, names: tuple[str, ...]) -> None:
        for name in names:
            value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name)
            if value is not None:
                array = np.ascontiguousarray(value)
                self._digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                self._digest.update(array.tobytes())

    def hex(self) -> str:
        return self._digest.hexdigest()


def inline_digests(job: dict[str, Any]) -> dict[str, Any]:
    content, users = Content(), Content()
    steps = 0
    digest = ""
    with msd_daemon.inline(job) as stream:
        for step in stream:
            for batch in step.microbatches(0):
                content.add(batch, FIELDS)
                users.add(batch.fields, USER_FIELDS)
            digest = step.plan.stream_digest
            steps += 1
            if steps == STEPS:
                break
    return {
        "steps": steps,
        "membership": digest,
        "content": content.hex(),
        "user_fields": users.hex(),
    }


def daemon_digests(node: Node, job: dict[str, Any]) -> dict[str, Any]:
    content, users = Content(), Content()
    steps = []

    def read(data: Any, step: Any) -> None:
        for batch in step:
            fields = dict(batch) | {"cu_seqlens_padded": batch.cu_seqlens_padded}
            content.add(fields, FIELDS)
            users.add(fields, USER_FIELDS)
            del batch, fields
        steps.append(step.number)

    run_ranks(node, job, {"dp": 1}, STEPS, read_step=read)
    return {"steps": len(steps), "content": content.hex(), "user_fields": users.hex()}


@pytest.mark.processes
@pytest.mark.parametrize("name", GOLDEN_JOBS)
def test_a_golden_job_gives_the_frozen_stream(start_node, tmp_path, name):
    job = job_of(tmp_path / name, name)
    found = inline_digests(job)
    served = daemon_digests(start_node(), job)
    assert served == {key: found[key] for key in served}
    if os.environ.get("MSD_WRITE_GOLDEN"):
        kept = golden() if FILE.exists() else {"stream": STREAM_VERSION, "jobs": {}}
        kept["jobs"][name] = found
        FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    assert golden()["stream"] == STREAM_VERSION
    assert golden()["jobs"][name] == found
