"""What a node of a cluster says of its planner, without wires."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from federation.cluster_hello import PlannerHello
from msd_client.contract.errors import PlannerUnavailableError
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.federation_options import FederationOptions
from msd_daemon.services import cluster_node
from msd_daemon.services.cluster_node import ClusterNode

P0 = PlannerHello("p0", True, 1)


class FakeLink:
    """A link whose planner leads and answers nothing."""

    leader: PlannerHello | None = P0
    leader_place = "10.0.0.1:5557"

    def send(self, *_: Any) -> None:
        """Nobody is there."""


@pytest.fixture
def node() -> ClusterNode:
    options = FederationOptions("n0", ("10.0.0.1:5557",), "127.0.0.1:0", "", "", False, True)
    owner = SimpleNamespace(cluster_sessions=list)
    found = ClusterNode(options, cast(DaemonConfig, None), cast(Any, None), cast(Any, owner))
    found._link = cast(Any, FakeLink())
    return found


def test_no_planner_is_there_until_one_answers(node: ClusterNode):
    assert node.waiting_for == "a planner (none answers yet)"
    assert node.planner_away_ns
    node._planner_up(P0)
    assert (node.waiting_for, node.planner_silence, node.planner_away_ns) == ("", "", 0)


def test_a_planner_that_is_silent_is_waited_for_by_name_until_it_is_heard(node: ClusterNode):
    node._planner_up(P0)
    node._planner_silent(5.0)
    assert "planner p0 at 10.0.0.1:5557 is silent since " in node.waiting_for
    assert node.planner_away_ns
    since_ns = node.planner_away_ns
    node._planner_down("it began anew")
    assert node.planner_away_ns == since_ns
    assert node.waiting_for == "a planner (it began anew)"
    node._planner_heard()
    assert (node.waiting_for, node.planner_away_ns) == ("", 0)


def test_a_stop_that_other_nodes_do_not_hear_of_says_so(
    node: ClusterNode, monkeypatch: pytest.MonkeyPatch
):
    node._planner_up(P0)
    assert node.stop_note("gpt") == ""
    node._planner_silent(5.0)
    note = node.stop_note("gpt")
    assert note.startswith("on this node only: planner p0 at 10.0.0.1:5557 is silent")
    assert "once that planner is heard again" in note
    assert "msdctl stop gpt on each of them" in note
    monkeypatch.setattr(FakeLink, "leader", None)
    node._planner_down("it is gone")
    assert "it is gone, so other nodes hear nothing of it" in node.stop_note("gpt")


async def test_a_planner_that_does_not_answer_is_told_with_a_remedy(
    node: ClusterNode, monkeypatch: pytest.MonkeyPatch
):
    async def link() -> FakeLink:
        return FakeLink()

    monkeypatch.setattr(node, "ready", link)
    monkeypatch.setattr(cluster_node, "ASK_TIMEOUT_S", 0.01)
    with pytest.raises(PlannerUnavailableError, match="systemctl status msd-planner") as found:
        await node.ask()
    assert "take effect" not in found.value.message
    with pytest.raises(PlannerUnavailableError, match="may still take effect once it answers"):
        await node.ask(("n1", True))
