"""What nodes of a cluster were told of a generation, and the record of it that a successor takes up."""

from __future__ import annotations

from dataclasses import dataclass, field

from federation.cluster_messages import BeginGeneration
from federation.messages import OpenJob
from federation.model.by_step import ByStep
from federation.model.job import ResolvedJob, decode_job
from federation.model.owners import Owners
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.plain import decode_plain


@dataclass
class ClusterGeneration:
    """A generation that was begun, running or not."""

    number: int
    begin: BeginGeneration
    owners: ByStep[Owners]
    tree: ClientPlaceTree
    """The mesh, with the node of each rank."""
    order: OpenJob
    gone: set[int] = field(default_factory=set)
    """Nodes that take no part any more."""

    def living(self) -> list[int]:
        """Return the nodes that take part, ascending."""
        return [node for node in range(len(self.begin.nodes)) if node not in self.gone]

    def living_names(self) -> list[str]:
        """Return their names."""
        return [self.begin.nodes[node] for node in self.living()]

    def encode(self, job: bytes) -> bytes:
        """Return what a planner that takes over has to know.

        Args:
            job: The encoded job.
        """
        return pack(
            {
                "generation": self.number,
                "begin": {
                    name: getattr(self.begin, name) for name in self.begin.__dataclass_fields__
                },
                "owners": self.owners.now.encode(),
                "former": [[end, old.encode()] for end, old in self.owners.former],
                "gone": sorted(self.gone),
                "horizon_steps": self.order.horizon_steps,
                "steps_kept": self.order.steps_kept,
                "job": job,
            }
        )

    @staticmethod
    def decode(record: bytes) -> tuple[ClusterGeneration, bytes, ResolvedJob]:
        """Return the generation of a record, and its job, encoded and not.

        Raises:
            ProtocolError: The record is not one.
        """
        kept = unpack_map(record)
        begin = decode_plain(BeginGeneration, kept["begin"], "generation")
        encoded: bytes = kept["job"]
        job = decode_job(unpack_map(encoded))
        lanes = [source.lane_count for source in job.sources]
        count = len(begin.nodes)
        former = [(int(end), Owners.decode(old, lanes, count)) for end, old in kept["former"]]
        order = OpenJob(
            unpack_map(encoded),
            begin.mesh,
            b"",
            kept["horizon_steps"],
            "",
            None,
            kept["steps_kept"],
            None,
            begin.rank_nodes,
        )
        generation = ClusterGeneration(
            kept["generation"],
            begin,
            ByStep(Owners.decode(kept["owners"], lanes, count), former),
            ClientPlaceTree.from_mesh(dict(begin.mesh), begin.rank_nodes),
            order,
            set(kept["gone"]),
        )
        return generation, encoded, job
