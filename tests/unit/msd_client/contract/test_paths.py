"""Where the socket lies without configuration, and folders that are refused."""

import os
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError, PermissionDeniedError
from msd_client.contract.paths import (
    check_private_dir,
    check_socket_path,
    default_runtime_dir,
    default_socket_path,
    default_state_dir,
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
