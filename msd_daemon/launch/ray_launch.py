"""`msdctl up --ray ADDRESS`: detached actors, one a node, that keep its daemon and the planner."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from msd_client.contract.errors import ConfigError, MsdError, NotFoundError, ResourceError
from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.launch.launch_options import LaunchOptions
from msd_daemon.launch.launch_plan import LaunchPlan, elect_planners
from msd_daemon.launch.meeting import NodeNote
from msd_daemon.launch.ray_node import RayNode
from msd_daemon.launch.waiting import wait_ready

NAMESPACE = "msd"
PREFIX = "msd-node-"
CALL_S = 20.0
STOP_S = 60.0
HEAD = "node:__internal_head__"
HOST_CHARACTERS_MAX = 48


class RayLaunch:
    """A launch on a Ray cluster.

    Args:
        address: Of the cluster, or `auto`.
        options: What the user asked for.

    Raises:
        ConfigError: Ray is not installed, or an option is of another launcher.
        ResourceError: The cluster can't be reached.
    """

    def __init__(self, address: str, options: LaunchOptions) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"msdctl up --ray needs ray ({error}): pip install 'msd[ray]'"
            ) from error
        if options.shared or options.srun_options:
            raise ConfigError("--shared and --srun-option are Slurm's: leave them out with --ray")
        self._ray = ray
        self._options = options
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ResourceError(f"Ray at {address} can't be reached: {error}") from error

    def up(self) -> Mapping[str, NodeNote]:
        """Start a daemon on every node, and return what they say once all are ready.

        Raises:
            ConfigError: A launch runs already.
            ResourceError: A node failed; all are ended again.
            DeadlineError: Some node is not ready in time; all are ended again.
        """
        if self._actors():
            raise ConfigError(
                "this Ray cluster has a launch of msd already: msdctl down --ray ends it, then up again"
            )
        places = _places(self._ray.nodes())
        options = self._options
        plan = LaunchPlan(
            launcher="ray",
            name=f"ray-{secrets.token_hex(4)}",
            nodes=list(places),
            planners=elect_planners(list(places), options.planners, options.store),
            has_keys=len(places) > 1,
            addresses={node: address for node, (_, address) in places.items()},
            interface=options.interface,
            store=options.store,
            config=options.config,
            state_dir=options.state_dir,
        )
        try:
            actors = {node: self._start(plan, node, place) for node, (place, _) in places.items()}
            return wait_ready(
                lambda: self._look(actors),
                plan.nodes,
                lambda: self._trouble(actors),
                options.timeout_s,
                "logs: agent.log beside each node's socket",
            )
        except (MsdError, KeyboardInterrupt):
            self.down()
            raise

    def notes(self) -> Mapping[str, NodeNote]:
        """Return what the nodes say of themselves; those whose actor starts again say nothing."""
        return self._notes(self._actors())

    def has_ended(self) -> bool:
        """True where no actor is left."""
        return not self._actors()

    def down(self) -> None:
        """End the launch: daemons drain, the planner goes last.

        Raises:
            NotFoundError: There is no launch.
        """
        actors = self._actors()
        if not actors:
            raise NotFoundError("this Ray cluster has no launch of msd: msdctl up --ray starts one")
        # All at once: a planner's node waits for the daemons of the others.
        stopping = [actor.stop.remote() for actor in actors.values()]
        self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for actor in actors.values():
            self._ray.kill(actor, no_restart=True)

    def let_go(self) -> None:
        """Leave the cluster; its detached actors stay."""
        self._ray.shutdown()

    def _actors(self) -> dict[str, Any]:
        """Return the handles of a launch's actors by node."""
        found = {}
        for entry in self._ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != NAMESPACE or not entry["name"].startswith(PREFIX):
                continue
            try:
                actor = self._ray.get_actor(entry["name"], namespace=NAMESPACE)
            except ValueError:
                continue  # it ended in between
            found[entry["name"].removeprefix(PREFIX)] = actor
        return dict(sorted(found.items()))

    def _start(self, plan: LaunchPlan, node: str, place: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kept = self._ray.remote(RayNode).options(
            name=f"{PREFIX}{node}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,  # trainers' resources stay theirs
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False),
        )
        return kept.remote(encode_plain(plan), node)

    def _look(self, actors: Mapping[str, Any]) -> dict[str, NodeNote]:
        """Carry what nodes published to the others; return what they say of themselves."""
        told: dict[str, bytes] = {}
        for found in self._asked(actors, "published").values():
            told |= found
        self._asked(actors, "take", told)
        return self._notes(actors)

    def _notes(self, actors: Mapping[str, Any]) -> dict[str, NodeNote]:
        return {
            node: decode_plain(NodeNote, note, node)
            for node, note in self._asked(actors, "note").items()
            if note is not None
        }

    def _trouble(self, actors: Mapping[str, Any]) -> str:
        found = self._asked(actors, "trouble")
        return "; ".join(f"{node}: {why}" for node, why in found.items() if why)

    def _asked(self, actors: Mapping[str, Any], verb: str, *arguments: Any) -> dict[str, Any]:
        """Return the answers of the actors that answer; one that starts again will later."""
        calls = {node: getattr(actor, verb).remote(*arguments) for node, actor in actors.items()}
        ready, _ = self._ray.wait(
            list(calls.values()), num_returns=max(1, len(calls)), timeout=CALL_S
        ) if calls else ([], [])  # fmt: skip
        found = {}
        for node, call in calls.items():
            if call in ready:
                try:
                    found[node] = self._ray.get(call)
                except self._ray.exceptions.RayTaskError as error:
                    raise ResourceError(f"node {node}: {error.cause}") from error
                except self._ray.exceptions.RayActorError as error:
                    if error.actor_init_failed:
                        raise ResourceError(f"node {node}: {error}") from error
        return found


def _places(nodes: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return name to (Ray's id, address) of the nodes that live, the head first.

    Raises:
        ResourceError: None lives.
    """
    found = []
    for node in nodes:
        if not node["Alive"]:
            continue
        host = re.sub(r"[^A-Za-z0-9.-]", "-", node["NodeManagerHostname"])[:HOST_CHARACTERS_MAX]
        name = f"{host.lstrip('.-') or 'node'}-{node['NodeID'][:8]}"  # a host may have several
        is_head = HEAD in node["Resources"]
        found.append((not is_head, name, (node["NodeID"], node["NodeManagerAddress"])))
    if not found:
        raise ResourceError("the Ray cluster has no living node")
    return {name: place for _, name, place in sorted(found)}
