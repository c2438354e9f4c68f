"""Has sources measured in a process of low priority that ends with the probe."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from federation.model.job import ResolvedJob, encode_job
from federation.model.source_profile import SourceProfile, decode_profile
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import MsdError
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.stores.options import encode_store_options

log = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 15.0
ANSWER_BYTES_MAX = 16 << 20


class SourceProbe:
    """A probe that runs.

    Args:
        job: The resolved job.
        sources: Numbers of the sources to measure.
        config: The daemon's: stores and the folder of indexes.
    """

    def __init__(self, job: ResolvedJob, sources: Sequence[int], config: DaemonConfig) -> None:
        self._job = job
        self._sources = list(sources)
        self._config = config
        self.pid: int | None = None
        """Of its process, while there is one."""

    async def run(self) -> dict[int, SourceProfile]:
        """Return the profiles by number; sources that could not be measured are logged and left out."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "msd_daemon.workers.probe_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.pid = process.pid
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_S * (1 + len(self._sources))):
                output, _ = await process.communicate(self._request())
            return self._answer(output)
        except (TimeoutError, MsdError, ValueError, LookupError) as error:
            log.warning("job %s: sources were not measured: %s", self._job.name, error)
            return {}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self.pid = None

    def _request(self) -> bytes:
        return pack(
            {
                "job": encode_job(self._job),
                "sources": self._sources,
                "stores": encode_store_options(self._config.stores),
                "index_dir": str(self._config.state_dir / "index"),
            }
        )

    def _answer(self, output: bytes) -> dict[int, SourceProfile]:
        answer = unpack_map(output, bytes_max=ANSWER_BYTES_MAX)
        for number, problem in answer["faults"].items():
            name = self._job.sources[int(number)].name
            log.warning("source %s was not measured: %s", name, problem)
        return {int(number): decode_profile(it) for number, it in answer["profiles"].items()}
