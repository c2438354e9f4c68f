"""Where an output can't be written is told in one line, before any work begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from msd_client.contract.errors import UsageError
from msd_client.msdctl import main
from msd_client.msdctl.whole_file import check_writable, write_output

VERBS = [("top", "--svg"), ("trace", "--out"), ("report", "job", "--out")]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["nope/x", "."])
def test_an_output_that_can_not_be_written_is_told_before_anything_is_asked(
    verb: tuple[str, ...], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*verb, str(tmp_path / place), "--socket", str(tmp_path / "no.sock")]
    assert main.run(arguments) == 2  # 3 where it asked the daemon, who is not there
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert str(tmp_path) in told


def test_looking_leaves_nothing_behind_and_spares_what_is_there(tmp_path: Path):
    path = tmp_path / "out.html"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"
    write_output(path, b"new")
    assert path.read_text() == "new"


def test_a_device_is_written_to_and_not_replaced():
    check_writable(Path("/dev/null"))
    write_output(Path("/dev/null"), b"text")
    assert Path("/dev/null").is_char_device()


def test_a_write_that_fails_after_all_is_told_too(tmp_path: Path):
    with pytest.raises(UsageError, match="can't be written: No such file or directory"):
        write_output(tmp_path / "gone" / "x", b"")
