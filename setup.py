"""Build hook for the optional C kernels; without a compiler their numpy twins are used."""

from setuptools import Extension, setup

KERNELS = {
    "federation.planning._kernel": "federation/planning/_kernel.c",
    "msd_daemon.gather._kernel": "msd_daemon/gather/_kernel.c",
    "msd_daemon.transforms._image_kernel": "msd_daemon/transforms/_image_kernel.c",
}

setup(
    ext_modules=[
        Extension(
            name,
            [source],
            optional=True,
            py_limited_api=True,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-O3"],
        )
        for name, source in KERNELS.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
