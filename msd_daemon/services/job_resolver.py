"""Resolves jobs in a short-lived process, so that pydantic and tokenizers never enter the daemon."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob, decode_job
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import DeadlineError, InternalError, decode_error
from msd_daemon.stores.options import StoreOptions, encode_store_options
from msd_daemon.workers.rights import Rights

RESOLVE_TIMEOUT_S = 600.0
ANSWER_BYTES_MAX = 256 << 20


@dataclass(frozen=True)
class Resolution:
    """A resolved job and its rendering for people."""

    job: ResolvedJob
    resolved_yaml: str


async def resolve(
    request: dict[str, Any],
    stores: StoreOptions,
    content_dir: Path,
    rights: Rights | None = None,
    roots: tuple[Path, ...] = (),
) -> Resolution:
    """Resolve a job in a process of its own.

    Args:
        request: `{text | map, base_dir, name}`.
        stores: How to list remote shards.
        content_dir: Where copies of users' code and lists are kept.
        rights: Of the job's owner, with which its files are opened; None: the daemon's.
        roots: Folders that its shards may lie in; none: any.

    Raises:
        JobError: All faults of the job at once.
        DeadlineError: Its files did not answer in time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "msd_daemon.workers.resolve_main",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            output, _ = await process.communicate(
                pack(request | _environment(stores, content_dir, rights, roots))
            )
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise DeadlineError(
            f"resolving job {request.get('name')!r} took over {RESOLVE_TIMEOUT_S:g} s: does the file "
            "system of its sources answer?"
        ) from error
    if not output:
        raise InternalError(f"the resolving process ended with status {process.returncode}")
    answer = unpack_map(output, bytes_max=ANSWER_BYTES_MAX)
    if "error" in answer:
        raise decode_error(**answer["error"])
    return Resolution(decode_job(answer["job"]), answer["resolved_yaml"])


def _environment(
    stores: StoreOptions, content_dir: Path, rights: Rights | None, roots: tuple[Path, ...]
) -> dict[str, Any]:
    """Return what the daemon says of itself to the process that resolves."""
    told: dict[str, Any] = {"roots": [str(root) for root in roots]}
    if rights is None:
        return told | {"stores": encode_store_options(stores), "store_dir": str(content_dir)}
    return told | {
        "stores": encode_store_options(stores.for_another_user()),
        "rights": [rights.uid, *rights.groups],
    }
