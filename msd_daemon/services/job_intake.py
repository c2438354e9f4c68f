"""Which job a client brings: a file's text or a submitted name, resolved once, with the client's rights."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from typing import Any

from federation.model.job import ResolvedJob
from msd_client.contract.codec import pack
from msd_client.contract.errors import PermissionDeniedError
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.services.client_server import Client
from msd_daemon.services.job_resolver import Resolution, resolve
from msd_daemon.services.session_table import SessionTable
from msd_daemon.workers.rights import Rights, rights_for


class JobIntake:
    """Of one daemon.

    Args:
        config: Gives the daemon's configuration, as it is now.
        table: Knows the jobs that were submitted.
    """

    def __init__(self, config: Callable[[], DaemonConfig], table: SessionTable) -> None:
        self._config = config
        self._table = table
        self._joining: dict[str, asyncio.Future[Resolution]] = {}

    async def for_rank(self, client: Client, body: dict[str, Any]) -> tuple[Resolution, str]:
        """Return the job that a joining rank brings, and the identity of its session here."""
        run = str(body.get("run", ""))
        if "submitted" in body:
            owner, found = self._table.submitted_job(str(body["submitted"]), client)
            return found, _session_key(owner, run, found.job)
        request = resolve_request(body)
        key = hashlib.sha256(pack([client.uid, run, request])).hexdigest()[:24]
        pending = self._joining.get(key)
        if pending is None:
            pending = asyncio.ensure_future(self.resolve(client, request))
            self._joining[key] = pending
            pending.add_done_callback(lambda _: self._joining.pop(key, None))
        resolution = await asyncio.shield(pending)
        return resolution, _session_key(client.uid, run, resolution.job)

    async def resolve(self, client: Client, request: dict[str, Any]) -> Resolution:
        """Resolve a job with the rights of who brings it.

        Raises:
            PermissionDeniedError: The daemon may not take them, or his job needs what only its own
                user may have here.
        """
        config, rights = self._config(), self.rights_of(client)
        return await resolve(request, config.stores, config.content_dir, rights, config.roots)

    def rights_of(self, client: Client) -> Rights | None:
        """Return what a client may read; None: what the daemon may.

        Raises:
            PermissionDeniedError: The daemon may not take these rights.
        """
        rights = rights_for(client.uid, client.gids, os.getuid())
        if rights is not None and self._config().federation is not None:
            raise PermissionDeniedError(
                f"the nodes of a cluster load for their own user alone, this one for uid {os.getuid()}: "
                "use a daemon of your own (msdctl up), or this node without federation.planners",
                uid=client.uid,
            )
        return rights

    def check_strategy(self, job: ResolvedJob) -> None:
        """Refuse to run a user's strategy in a planner that others depend on, or under another's uid.

        Raises:
            PermissionDeniedError: This daemon serves several uids.
        """
        config = self._config()
        if not (config.allow_uids or config.allow_gids):
            return
        if job.mixture_hook is not None:
            raise PermissionDeniedError(
                f"mixture.hook {job.mixture_hook.call.call}: it would run under uid {os.getuid()}, and "
                "this daemon serves other uids too (access.allow_uids, allow_gids): use a daemon of "
                "your own, or set weights by data.set_mixture"
            )
        if job.strategy_call is not None:
            raise PermissionDeniedError(
                f"strategy {job.strategy}: the planner runs under uid {os.getuid()}, and this daemon "
                "serves other uids too (access.allow_uids, allow_gids), so it runs no strategy of a "
                "user: use a daemon of your own, or a built-in strategy",
                strategy=job.strategy,
            )


def resolve_request(body: dict[str, Any]) -> dict[str, Any]:
    """Return what of a request says which job is meant."""
    return {"text": body["text"], "base_dir": body["base_dir"], "name": body["name"]}


def _session_key(uid: int, run: str, job: ResolvedJob) -> str:
    """Return what ranks of one run have in common: two jobs that differ in name alone are two runs."""
    return hashlib.sha256(pack([uid, run, job.name, job.digest()])).hexdigest()[:16]
