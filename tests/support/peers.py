"""A second environment with the data libraries whose shards msd reads: `python peers.py FOLDER`.

MosaicML Streaming pins another numpy, and none of them belongs into the environment of the daemon,
so they are installed without their dependencies; what they import beside is taken from the
environment of the interpreter that runs this (torch, numpy, pyarrow ...). Tests run their writers
there and are skipped where it is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers"
PACKAGES = (
    "mosaicml-streaming==0.13.0",
    "litdata==0.2.76",
    "datasets==5.2.0",
    # What their writers import and the environment of msd has not:
    "brotli==1.2.1",
    "cramjam==2.14.0",
    "dill==0.4.1",
    "lightning-utilities==0.15.3",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
    "python-snappy==0.7.3",
    "xxhash==4.1.0",
    "zstd==1.5.7.2",
)


def peers_python() -> Path | None:
    """Return the interpreter of the peers' environment, None where there is none."""
    named = os.environ.get("MSD_PEERS_PYTHON")
    python = Path(named) if named else FOLDER / "bin" / "python"
    return python if python.exists() else None


def make_peers(folder: Path) -> None:
    """Make the environment anew."""
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *PACKAGES], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    Path(own.stdout.strip(), "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    make_peers(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
