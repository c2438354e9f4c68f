"""Searches that read journals and sources: run as msdctl's own verbs, in a process each.

They load tokenizers and read shards, so neither the daemon nor this process should; one at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from msd_client.contract.errors import DeadlineError, ResourceError, UsageError

SEARCH_TIMEOUT_S = 120.0
TEXT_LENGTH_MAX = 4096
ROWS_SHOWN_MAX = 2000


class Searches:
    """Runs searches over runs of one daemon's jobs.

    Args:
        socket_path: The daemon's.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket = str(socket_path)
        self._lock = asyncio.Lock()

    async def lineage(self, job: str, step: str, rank: str) -> dict[str, Any]:
        """Return all that a step held; see `msdctl lineage --json`.

        Raises:
            UsageError: The step or the rank is no number.
            MsdError: The search failed, in the verb's own words.
        """
        options = ["--step", _digits(step, "step")]
        if rank:
            options += ["--rank", _digits(rank, "rank")]
        return _cut(await self._run("lineage", options, (job,)), "rows")

    async def find(self, job: str, source: str, key: str) -> dict[str, Any]:
        """Return where a record went; see `msdctl find --json`.

        Raises:
            MsdError: The search failed, in the verb's own words.
        """
        return _cut(await self._run("find", [], (job, source, key)), "occurrences")

    async def _run(self, verb: str, options: list[str], words: tuple[str, ...]) -> dict[str, Any]:
        for word in words:
            if not word or len(word) > TEXT_LENGTH_MAX or "\0" in word:
                raise UsageError(f"{verb}: {word[:40]!r}: write 1 to {TEXT_LENGTH_MAX} characters")
        command = [
            sys.executable, "-m", "msd_client.msdctl.main", verb, "--json", "--socket", self._socket,
            *options, "--", *words,
        ]  # fmt: skip
        async with self._lock:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(SEARCH_TIMEOUT_S):
                    output, said = await process.communicate()
            except BaseException as error:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                if isinstance(error, TimeoutError):
                    raise DeadlineError(
                        f"{verb} took over {SEARCH_TIMEOUT_S:g} s: run msdctl {verb} in a shell"
                    ) from error
                raise
        if process.returncode:
            raise ResourceError(said.decode(errors="replace").strip()[-2000:] or f"{verb} failed")
        found: dict[str, Any] = json.loads(output)
        return found


def _digits(text: str, name: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UsageError(f"{name} {text[:40]!r} is not a whole number: write one from 0 on")
    return text


def _cut(found: dict[str, Any], key: str) -> dict[str, Any]:
    rows = found[key]
    return found | {key: rows[:ROWS_SHOWN_MAX], "total": len(rows)}
