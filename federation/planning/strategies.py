"""Built-in strategies, by the name that a job gives; each is a chain of a graph's verbs."""

from __future__ import annotations

from collections.abc import Callable

from federation.planning.dgraph import DGraph
from msd_client.contract.errors import ConfigError

Strategy = Callable[[DGraph, int], DGraph]


def balanced(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even the cost of ranks by the job's cost model and objective."""
    return (
        graph.mix(graph.schedule)
        .distribute("dp")
        .cost(graph.cost_model)
        .balance("greedy", graph.objective)
    )


def unbalanced(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Deal rows as they were packed; the cost is only reported."""
    return graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)


def vlm_backbone(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even what the backbone pays for rows; media are encoded where their text is."""
    return (
        graph.mix(graph.schedule)
        .distribute("dp")
        .cost(graph.cost_model)
        .balance("greedy", graph.objective)
    )


def vlm_hybrid(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even backbone and encoders each, microbatch by microbatch: embeddings go home in every one."""
    return (
        graph.mix(graph.schedule)
        .distribute("dp")
        .cost(graph.cost_model)
        .balance("greedy", "microbatch")
        .hybrid()
    )


STRATEGIES: dict[str, Strategy] = {
    "balanced": balanced,
    "unbalanced": unbalanced,
    "vlm_backbone": vlm_backbone,
    "vlm_hybrid": vlm_hybrid,
}
HYBRID_STRATEGIES = ("vlm_hybrid",)
"""Those whose jobs need `batch.encode: any`."""


def find_strategy(name: str) -> Strategy:
    """Return a strategy by name.

    Raises:
        ConfigError: No strategy has that name; those that exist are listed.
    """
    found = STRATEGIES.get(name)
    if found is None:
        raise ConfigError(
            f"strategy {name!r} is unknown; there are {', '.join(sorted(STRATEGIES))}",
            strategy=name,
        )
    return found
