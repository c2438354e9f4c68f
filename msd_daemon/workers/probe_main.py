"""Main of the process that measures sources for the daemon, then ends.

Reads one msgpack map from stdin (`job`, `sources`, `stores`, `index_dir`), writes one to stdout:
`profiles` and `faults` by source number. It yields the CPU to everybody else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from federation.model.job import decode_job
from federation.model.source_profile import encode_profile
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import MsdError
from msd_daemon.sources.probe import probe_source
from msd_daemon.stores.options import configure_stores, decode_store_options
from msd_daemon.transforms import open_tokenizer
from msd_daemon.workers.process_name import set_process_name

REQUEST_BYTES_MAX = 512 << 20
LOWEST_PRIORITY = 19


def main() -> None:
    """Answer the request on stdin."""
    os.nice(LOWEST_PRIORITY)
    set_process_name("msd-probe")
    request = unpack_map(sys.stdin.buffer.read(), bytes_max=REQUEST_BYTES_MAX)
    sys.stdout.buffer.write(pack(respond(request)))
    sys.stdout.buffer.flush()


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Return `profiles` and `faults`, by source number as text."""
    job = decode_job(request["job"])
    configure_stores(decode_store_options(request["stores"]))
    tokenizer = open_tokenizer(job.tokenizer)
    profiles: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for number in request["sources"]:
        try:
            profile = probe_source(job, number, tokenizer, index_dir=Path(request["index_dir"]))
        except MsdError as error:
            faults[str(number)] = error.message
        except (OSError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            faults[str(number)] = f"{type(error).__name__}: {error}"
        else:
            profiles[str(number)] = encode_profile(profile)
    return {"profiles": profiles, "faults": faults}


if __name__ == "__main__":
    main()
