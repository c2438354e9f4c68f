"""What a launch is: its nodes, who plans, and what all of them need to know. Plain; one file of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.launch.meeting import PLAN_FILE, Meeting

PLANNERS_MAX = 7


@dataclass(frozen=True)
class LaunchPlan:
    """A launch."""

    launcher: Literal["slurm", "ray"]
    name: str
    """Of the launch, for people: `slurm-77.0`."""
    nodes: list[str]
    """In the scheduler's order."""
    planners: list[str]
    """Nodes that a planner runs on, too; the first of `nodes`."""
    has_keys: bool
    """False: one machine, so nothing listens beyond loopback."""
    addresses: dict[str, str] = field(default_factory=dict)
    """By node, where the scheduler knows them; else each finds its own."""
    interface: str = ""
    """Network interface whose address is each node's; empty: the one that its name or route has."""
    store: str = ""
    """URL of the planners' store; empty: SQLite in the state folder of the one planner."""
    config: str = ""
    """daemon.toml; empty: what MSD_CONFIG names, if any."""
    state_dir: str = ""
    """On a local disk of each node; empty: in the runtime folder."""

    def planner_name(self, node: str) -> str:
        """Return the name by which the planner of a node is known and has its key."""
        return f"planner-{self.planners.index(node) + 1}"

    def key_names(self) -> list[str]:
        """Return whose keys there are."""
        return [*self.nodes, *map(self.planner_name, self.planners)]


def elect_planners(nodes: list[str], count: int, store: str) -> list[str]:
    """Return the nodes that planners run on: the first of the list.

    Raises:
        ConfigError: There are fewer nodes, or several planners have no store that they share.
    """
    if not 1 <= count <= min(PLANNERS_MAX, len(nodes)):
        raise ConfigError(
            f"--planners {count}: between 1 and {PLANNERS_MAX}, and at most one a node of {len(nodes)}"
        )
    if count > 1 and not store.startswith(("etcd://", "etcds://")):
        raise ConfigError(
            f"--planners {count}: planners on several nodes share an etcd: --store "
            "etcd://host1:2379,host2,host3; without one there is one planner and no standby"
        )
    return nodes[:count]


def write_plan(meeting: Meeting, plan: LaunchPlan) -> None:
    """Publish the plan to the nodes."""
    meeting.publish(PLAN_FILE, json.dumps(encode_plain(plan)).encode() + b"\n")


def read_plan(meeting: Meeting) -> LaunchPlan | None:
    """Return the plan; None where there is none.

    Raises:
        ConfigError: It is none of this release's.
    """
    content = meeting.read(PLAN_FILE)
    if content is None:
        return None
    try:
        return decode_plain(LaunchPlan, json.loads(content), PLAN_FILE)
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{meeting.path / PLAN_FILE}: {error}: another release of msd wrote it; remove the folder"
        ) from error
