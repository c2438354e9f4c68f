"""Main of the process that resolves one job: text in, resolved job or error out, then it ends.

Short-lived on purpose: pydantic, PyYAML and an opened tokenizer cost tens of MiB that the daemon
and its fork server would otherwise carry for ever. Reads one msgpack map from stdin
(`text` or `map`, `base_dir`, `name`, optional `mesh` and `stores`), writes one to stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from federation.model.job import ResolvedJob
from msd_client.contract.errors import (
    ConfigError,
    InternalError,
    MsdError,
    PermissionDeniedError,
    encode_error,
)
from msd_client.contract.paths import default_runtime_dir, prepare_private_dir

REQUEST_BYTES_MAX = 4 << 20


def main() -> None:
    """Answer the request on stdin."""
    answer = respond(sys.stdin.buffer)
    try:
        packed = msgpack.packb(answer, use_bin_type=True)
    except (ValueError, OverflowError) as error:  # a text that is no Unicode, a number too large
        fault = ConfigError(f"the resolved job can't be sent: {error}; see the names in the job")
        packed = msgpack.packb({"error": encode_error(fault)}, use_bin_type=True)
    sys.stdout.buffer.write(packed)
    sys.stdout.buffer.flush()


def respond(stream: BinaryIO) -> dict[str, Any]:
    """Return `{"job", "resolved_yaml"}`, or `{"error"}` with what was wrong."""
    try:
        return _resolve(_read(stream))
    except MsdError as error:
        return {"error": encode_error(error)}
    except Exception as error:  # noqa: BLE001 - root of a child: the daemon must get an answer
        fault = InternalError(f"resolving the job failed: {type(error).__name__}: {error}")
        return {"error": encode_error(fault)}


def _read(stream: BinaryIO) -> dict[str, Any]:
    data = stream.read(REQUEST_BYTES_MAX + 1)
    if len(data) > REQUEST_BYTES_MAX:
        raise ConfigError(f"the job takes over {REQUEST_BYTES_MAX} bytes: shorten it, use globs")
    try:
        request = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ConfigError("the request to resolve a job is not msgpack: send one map") from error
    if not isinstance(request, dict) or not isinstance(request.get("base_dir"), str):
        raise ConfigError("the request to resolve a job lacks base_dir: send one map with it")
    return request


def _resolve(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("rights"):  # before anything of the job is opened
        from msd_daemon.workers.rights import Rights

        uid, *groups = request["rights"]
        Rights(uid, groups[0], tuple(groups)).take()
        # Copies of his code lie where he may write; the daemon's folders are not his.
        own = prepare_private_dir(default_runtime_dir({}, uid), uid)
        request["store_dir"] = str(own / "content")
    # Imported here, so that a malformed request is answered without loading pydantic.
    from federation.model.job import encode_job
    from msd_daemon.config.resolve import check_mesh, render_resolved_yaml, resolve_job
    from msd_daemon.stores.options import configure_stores, decode_store_options

    if "stores" in request:
        configure_stores(decode_store_options(request["stores"]))

    written = request["text"] if "text" in request else request.get("map", {})
    store_dir = Path(request["store_dir"]) if request.get("store_dir") else None
    job = resolve_job(
        written, Path(request["base_dir"]), str(request.get("name") or "job"), store_dir
    )
    _check_roots(job, request.get("roots") or [])
    if request.get("mesh") is not None:
        check_mesh(job, request["mesh"])
    return {"job": encode_job(job), "resolved_yaml": render_resolved_yaml(job)}


def _check_roots(job: ResolvedJob, roots: list[str]) -> None:
    """Refuse shards that lie in none of the folders that jobs may read; links count where they end.

    Raises:
        PermissionDeniedError: One does.
    """
    if not roots:
        return
    allowed = [Path(root).resolve() for root in roots]
    for source in job.sources:
        for shard in source.shards:
            if "://" in shard.path:
                continue
            place = Path(shard.path).resolve()
            if not any(place.is_relative_to(root) for root in allowed):
                raise PermissionDeniedError(
                    f"sources.{source.name}: {shard.path} lies in none of the folders that jobs may read "
                    f"here ({', '.join(roots)}): move it, or ask the daemon's owner for access.roots",
                    source=source.name,
                )


if __name__ == "__main__":
    main()
