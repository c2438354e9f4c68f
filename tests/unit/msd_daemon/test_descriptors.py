"""Descriptors of any number can be asked about."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from msd_daemon.descriptors import is_readable


def test_a_descriptor_beyond_what_select_takes_is_looked_at() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("this process may not have so many open files")
    read_fd, write_fd = os.pipe()
    high = fcntl.fcntl(read_fd, fcntl.F_DUPFD_CLOEXEC, 1050)
    try:
        assert not is_readable(high)
        os.write(write_fd, b"x")
        assert is_readable(high)
        os.read(read_fd, 1)
        os.close(write_fd)
        assert is_readable(high, 1.0), "its end can be read too"
    finally:
        os.close(high)
        os.close(read_fd)
