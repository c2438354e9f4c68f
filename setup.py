"""Build hook for the optional C kernels; without a compiler their stand-ins are used.

MSD_PURE=1 leaves them out: that wheel fits every machine and gives the same bytes, more slowly.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup

KERNELS = (
    "federation.planning._kernel",
    "msd_daemon.gather._kernel",
    "msd_daemon.transforms._image_kernel",
)
ROOT = Path(__file__).parent
STAMP = runpy.run_path(str(ROOT / "federation" / "kernel_stamp.py"))


def extension(name: str) -> Extension:
    """Return the build of a kernel, stamped with the digest of its sources."""
    found = STAMP["kernel_sources"](ROOT.joinpath(*name.split(".")[:-1]))
    sources = [path.relative_to(ROOT).as_posix() for path in found]
    return Extension(
        name,
        [path for path in sources if path.endswith(".c")],
        depends=[path for path in sources if path.endswith(".h")],
        optional=True,
        py_limited_api=True,
        define_macros=[
            ("Py_LIMITED_API", "0x030B0000"),
            ("MSD_KERNEL_STAMP", f'"{STAMP["stamp_of"](found)}"'),
        ],
        # Hidden: files of one kernel see each other's names, other libraries do not.
        extra_compile_args=["-O3", "-fvisibility=hidden"],
    )


IS_PURE = os.environ.get("MSD_PURE") == "1"

setup(
    ext_modules=[] if IS_PURE else [extension(name) for name in KERNELS],
    options={
        "bdist_wheel": {} if IS_PURE else {"py_limited_api": "cp311"},
        # A binary of older sources may be newer than these, so times say nothing.
        "build_ext": {"force": True},
    },
)
