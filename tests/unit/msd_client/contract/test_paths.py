"""Where the socket lies without configuration, and folders that are refused."""

import os
import tempfile
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError, PermissionDeniedError
from msd_client.contract.paths import (
    LAUNCHED,
    check_private_dir,
    check_socket_path,
    default_runtime_dir,
    default_socket_path,
    default_state_dir,
    is_launched,
    launched_dirs,
    launched_name,
    prepare_private_dir,
)

UID = os.geteuid()


def test_runtime_folder_is_under_xdg_where_it_is_ours(tmp_path):
    assert default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}, UID) == tmp_path / "msd"


@pytest.mark.parametrize("base", ["", "relative", "/nonexistent/folder"])
def test_unusable_xdg_folder_is_passed_over(base):
    assert default_runtime_dir({"XDG_RUNTIME_DIR": base}, 1234) == Path("/tmp/msd-1234")


def test_xdg_folder_of_another_user_is_passed_over(tmp_path):
    found = default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}, UID + 1)
    assert found == Path(f"/tmp/msd-{UID + 1}")


def test_environment_names_socket_before_folder():
    environ = {"MSD__DAEMON__RUNTIME_DIR": "/run/a"}
    assert default_socket_path(environ, 7) == Path("/run/a/msd.sock")
    assert default_socket_path(environ | {"MSD__DAEMON__SOCKET": "/x.sock"}, 7) == Path("/x.sock")


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/msd"),
        ({"XDG_STATE_HOME": "rel", "HOME": "/h"}, "/h/.local/state/msd"),
        ({"MSD__DAEMON__STATE_DIR": "/d"}, "/d"),
        ({}, "/tmp/msd-7/state"),
    ],
)
def test_state_folder(environ, path):
    assert default_state_dir(environ, 7) == Path(path)


def test_socket_path_limit_is_107_bytes_not_characters():
    check_socket_path(Path("/" + "a" * 106))
    with pytest.raises(ConfigError, match="108 bytes long"):
        check_socket_path(Path("/" + "a" * 107))
    with pytest.raises(ConfigError, match="109 bytes long"):
        check_socket_path(Path("/" + "ü" * 54))


@pytest.mark.parametrize("path", ["msd.sock", "/a\0b"])
def test_other_socket_paths_are_refused(path):
    with pytest.raises(ConfigError, match="not an absolute path"):
        check_socket_path(Path(path))


def test_folder_is_made_with_0750_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        made = prepare_private_dir(tmp_path / "a" / "msd", UID)
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o750
    assert prepare_private_dir(made, UID) == made


def test_folder_that_others_may_write_is_refused(tmp_path):
    folder = tmp_path / "msd"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionDeniedError, match="mode 0777"):
        prepare_private_dir(folder, UID)


def test_link_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "msd").symlink_to(tmp_path)
    with pytest.raises(PermissionDeniedError, match="links are refused"):
        prepare_private_dir(tmp_path / "msd", UID)


def test_folder_of_another_user_is_refused(tmp_path):
    tmp_path.chmod(0o750)
    if UID == 0:
        os.chown(tmp_path, 54321, -1)
        with pytest.raises(PermissionDeniedError, match="belongs to uid 54321"):
            check_private_dir(tmp_path, UID)
    else:
        with pytest.raises(PermissionDeniedError, match=f"belongs to uid {UID}"):
            check_private_dir(tmp_path, UID + 1)


def test_folder_that_cannot_be_made_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionDeniedError, match=r"daemon\.runtime_dir"):
        prepare_private_dir(tmp_path / "file" / "msd", UID)


SLURM = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n01"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "77"}, None),
        (SLURM, "slurm-77.0-n01"),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, "slurm-77.2-n01"),
        (SLURM | {"SLURMD_NODENAME": "../../x"}, "slurm-77.0-.._.._x"),
        ({"RAY_RAYLET_PID": "4711"}, "ray-4711"),
        ({"RAY_RAYLET_PID": "../x"}, None),
        (SLURM | {"RAY_RAYLET_PID": "4711"}, "ray-4711"),
    ],
)
def test_a_launch_has_one_name_for_the_daemon_and_its_ranks(environ, wanted):
    assert launched_name(environ) == wanted
    assert all(path.name == wanted for path in launched_dirs(environ, UID))


def test_folders_whose_sockets_path_would_be_too_long_are_passed_over(tmp_path):
    deep = tmp_path / ("x" * 90)
    usual = Path(f"/tmp/msd-{UID}/slurm-77.0-n01")
    assert launched_dirs(SLURM | {"SLURM_TMPDIR": str(deep)}, UID) == [usual]
    assert launched_dirs(SLURM | {"SLURM_TMPDIR": "/s"}, UID) == [Path("/s/slurm-77.0-n01"), usual]
    assert launched_dirs(SLURM | {"SLURM_TMPDIR": "s"}, UID) == [usual]
    assert launched_dirs(SLURM | {"SLURMD_NODENAME": "n" * 100}, UID) == []


def test_ranks_find_the_daemon_of_their_launch_once_it_is_there():
    with tempfile.TemporaryDirectory(prefix="msd-t", dir="/tmp") as base:
        environ = SLURM | {"SLURM_TMPDIR": base, "XDG_RUNTIME_DIR": base}
        assert default_socket_path(environ, UID) == Path(base, "msd/msd.sock")
        folder = Path(base, "slurm-77.0-n01")
        folder.mkdir()
        assert default_socket_path(environ, UID) == Path(base, "msd/msd.sock")
        (folder / LAUNCHED).write_text("")
        assert default_socket_path(environ, UID) == folder / "msd.sock"
        other = environ | {"SLURM_RESTART_COUNT": "1"}
        assert default_socket_path(other, UID) == Path(base, "msd/msd.sock")
        named = environ | {"MSD__DAEMON__SOCKET": "/x.sock"}
        assert default_socket_path(named, UID) == Path("/x.sock")
        assert not is_launched(folder, UID + 1)
