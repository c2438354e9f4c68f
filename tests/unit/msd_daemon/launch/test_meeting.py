"""The folder in which the nodes of a launch meet, and the plan that lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.launch.job_keys import JobKeys
from msd_daemon.launch.launch_plan import LaunchPlan, elect_planners, read_plan, write_plan
from msd_daemon.launch.meeting import FILE_BYTES_MAX, Meeting, NodeNote, PlannerNote

PLAN = LaunchPlan("slurm", "slurm-7.0", ["n1", "n2"], ["n1"], has_keys=True)


def test_what_one_publishes_the_others_read(tmp_path: Path) -> None:
    one, other = Meeting(tmp_path / "meet"), Meeting(tmp_path / "meet")
    assert read_plan(other) is None
    write_plan(one, PLAN)
    assert read_plan(other) == PLAN
    note = NodeNote("n1", "ready", "10.0.0.1", "/tmp/s", starts=2)
    one.write_node(NodeNote("n1", "starting"))
    one.write_node(note)
    one.write_planner("n1", PlannerNote("tcp://10.0.0.1:7"))
    assert other.nodes() == {"n1": note}
    assert other.planners() == {"n1": PlannerNote("tcp://10.0.0.1:7")}
    assert not other.is_stopped
    one.ask_to_stop()
    assert other.is_stopped


def test_a_file_that_is_being_written_is_not_there(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "meet")
    (meeting.path / "nodes" / ".n1.json.host.1").write_text('{"node": "n1", "sta')
    assert meeting.nodes() == {}


def test_it_is_removed_with_what_was_published_and_nothing_else(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "meet")
    write_plan(meeting, PLAN)
    meeting.write_node(NodeNote("n1", "ended"))
    (meeting.path / "n1.log").write_text("a log")
    meeting.remove()
    assert [path.name for path in meeting.path.iterdir()] == ["n1.log"]
    assert meeting.is_gone
    assert meeting.is_stopped, "agents that were late end, too"
    (meeting.path / "n1.log").unlink()
    Meeting(meeting.path).remove()
    assert not meeting.path.exists()


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.mkdir(mode=0o700)
    Meeting(path)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755: whom this folder lists is let in"):
        Meeting(path)


def test_a_folder_that_can_not_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory: give another folder .*--shared"):
        Meeting(tmp_path / "file" / "meet")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"node": "n1"}', b'{"node": "n1", "state": "x"}', b"\xff"]
)
def test_what_is_no_note_is_named(tmp_path: Path, content: bytes) -> None:
    meeting = Meeting(tmp_path / "meet")
    meeting.publish("nodes/n1.json", content)
    with pytest.raises(ConfigError, match=r"n1\.json: .*: remove it"):
        meeting.nodes()
    meeting.publish("launch.json", content)
    with pytest.raises(ConfigError, match="another release of msd wrote it"):
        read_plan(meeting)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "meet")
    meeting.publish("nodes/n1.json", b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="larger than 65536 bytes"):
        meeting.nodes()


def test_planners_are_elected_from_the_first_nodes() -> None:
    nodes = [f"n{number}" for number in range(9)]
    assert elect_planners(nodes, 1, "") == ["n0"]
    assert elect_planners(nodes, 3, "etcd://a") == ["n0", "n1", "n2"]
    with pytest.raises(ConfigError, match="share an etcd"):
        elect_planners(nodes, 2, "")
    with pytest.raises(ConfigError, match="share an etcd"):
        elect_planners(nodes, 2, "sqlite:///tmp/x")
    for count in (0, 8, -1):
        with pytest.raises(ConfigError, match="at most one a node of 9"):
            elect_planners(nodes, count, "etcd://a")
    with pytest.raises(ConfigError, match="at most one a node of 1"):
        elect_planners(["n1"], 2, "etcd://a")


def test_keys_are_made_where_they_are_of_and_public_ones_travel(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "meet")
    first = JobKeys(tmp_path / "first", ["n1", "planner-1"], PLAN.key_names())
    second = JobKeys(tmp_path / "second", ["n2"], ["planner-1"])
    second.publish(meeting)
    assert second.missing(meeting) == ["planner-1"]
    first.publish(meeting)
    assert first.missing(meeting) == second.missing(meeting) == []
    assert sorted(os.listdir(first.folder)) == [
        "n1.pub", "n1.secret", "n2.pub", "planner-1.pub", "planner-1.secret",
    ]  # fmt: skip
    assert sorted(os.listdir(second.folder)) == ["n2.pub", "n2.secret", "planner-1.pub"]
    assert sorted(os.listdir(meeting.path / "keys")) == ["n1.pub", "n2.pub", "planner-1.pub"]
    assert (first.folder / "n2.pub").read_bytes() == (second.folder / "n2.pub").read_bytes()
    before = (second.folder / "n2.secret").read_bytes()
    second.publish(meeting)  # an agent that was started again
    assert (second.folder / "n2.secret").read_bytes() == before
