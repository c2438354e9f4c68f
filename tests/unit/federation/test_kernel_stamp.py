"""A compiled kernel of other sources than those beside it is never used, and that is said."""

import logging
import sys
from pathlib import Path

import pytest

import msd_daemon.gather
from federation.kernel_stamp import kernel_sources, load_kernel, stamp_of
from federation.planning import kernel
from msd_daemon.transforms import image_resize


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a kernel's sources; the kernel is a module made by `build`."""
    native = tmp_path / "some_kernels" / "native"
    native.mkdir(parents=True)
    (native / "loops.c").write_text("int loops;\n")
    (native / "loops.h").write_text("extern int loops;\n")
    (native / "notes.txt").write_text("no source\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield native.parent
    for name in [name for name in sys.modules if name.startswith("some_kernels")]:
        del sys.modules[name]


def build(folder, stamp):
    (folder / "_kernel.py").write_text(f"stamp = {stamp!r}\n")


def test_a_kernel_of_these_sources_is_used(package, caplog):
    build(package, stamp_of(kernel_sources(package)))
    assert load_kernel("some_kernels._kernel", package).stamp
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        lambda native: (native / "loops.c").write_text("int loops = 1;\n"),
        lambda native: (native / "loops.h").write_text("extern long loops;\n"),
        lambda native: (native / "more.c").write_text(""),
        lambda native: (native / "loops.h").unlink(),
        lambda native: (native / "loops.c").rename(native / "other.c"),
    ],
)
def test_a_kernel_of_other_sources_is_refused_with_one_line(package, caplog, change):
    build(package, stamp_of(kernel_sources(package)))
    change(package / "native")
    with caplog.at_level(logging.WARNING):
        assert load_kernel("some_kernels._kernel", package) is None
    (line,) = caplog.records
    assert "some_kernels._kernel was built of other sources" in line.getMessage()
    assert "rebuild it: pip install" in line.getMessage()


def test_a_kernel_from_before_there_were_stamps_is_refused(package):
    (package / "_kernel.py").write_text("")
    assert load_kernel("some_kernels._kernel", package) is None


def test_where_none_was_built_nothing_is_said(package, caplog):
    assert load_kernel("some_kernels._kernel", package) is None
    assert not caplog.records


def test_an_installed_kernel_has_no_sources_beside_it(package):
    build(package, "0123456789abcdef")
    for path in kernel_sources(package):
        path.unlink()
    assert load_kernel("some_kernels._kernel", package).stamp == "0123456789abcdef"


@pytest.mark.parametrize(
    ("module", "used"),
    [
        (kernel._kernel, kernel.KERNEL),
        (msd_daemon.gather._kernel, msd_daemon.gather.KERNEL),
        (image_resize.kernel, image_resize.KERNEL),
    ],
)
def test_the_kernels_in_use_are_of_the_sources_in_the_tree(module, used):
    if module is None:
        assert used != "c"
        pytest.skip("the kernel was not built")
    assert module.stamp == stamp_of(kernel_sources(Path(module.__file__).parent))
