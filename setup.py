"""Build hook for the optional gather kernel; without a compiler the numpy twin is used."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "msd_daemon.gather._kernel",
            ["msd_daemon/gather/_kernel.c"],
            optional=True,
            py_limited_api=True,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-O3"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
