"""Built-in strategies, by the name that a job gives; each is a chain of a graph's verbs."""

from __future__ import annotations

from collections.abc import Callable

from federation.planning.dgraph import DGraph
from msd_client.contract.errors import ConfigError, StrategyError

Strategy = Callable[[DGraph, int], DGraph]


def balanced(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even the cost of ranks by the job's cost model and objective."""
    return (
        graph.mix(graph.schedule)
        .distribute("dp")
        .cost(graph.cost_model)
        .balance("greedy", graph.objective)
    )


def local(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even the cost as `balanced` does; among placements of like cost, fewest bytes across nodes."""
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)
    return graph.balance("greedy", graph.objective, is_local=True)


def unbalanced(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Deal rows as they were packed, the native order; the cost is only reported."""
    return graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)


def random(graph: DGraph, step: int) -> DGraph:
    """Deal rows in an order that the step's number sets: the baseline of a shuffling loader."""
    return graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model).shuffle(step)


def long_short(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Put rows of long documents beside each other and short ones likewise, microbatch by microbatch.

    No rank waits at a microbatch's end for another's long documents.
    """
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)
    return graph.balance("greedy", "microbatch")


def vlm_backbone(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even the backbone's cost, for which an image is its tokens; media are encoded at home."""
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model.backbone)
    return graph.balance("greedy", graph.objective)


def long_context(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Let documents of more than half a row wait for every eighth step, then even the cost."""
    graph = graph.delay(over_tokens=graph.row_tokens // 2, steps=8).mix(graph.schedule)
    return graph.distribute("dp").cost(graph.cost_model).balance("greedy", graph.objective)


def vlm_hybrid(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Even backbone and encoders each, microbatch by microbatch: embeddings go home in every one."""
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model.backbone)
    return graph.balance("greedy", "microbatch").hybrid()


STRATEGIES: dict[str, Strategy] = {
    "balanced": balanced,
    "local": local,
    "long_context": long_context,
    "long_short": long_short,
    "native": unbalanced,
    "random": random,
    "unbalanced": unbalanced,
    "vlm_backbone": vlm_backbone,
    "vlm_hybrid": vlm_hybrid,
}
HYBRID_STRATEGIES = ("vlm_hybrid",)
"""Those whose jobs need `batch.encode: any`."""
DELAYING_STRATEGIES = ("long_context",)
"""Those that let documents wait, which not every packing can."""


class WatchedStrategy:
    """A strategy that keeps the graph of the step it made last, for those who look at one."""

    def __init__(self, strategy: Strategy) -> None:
        """Watch a strategy."""
        self._strategy = strategy
        self.graph: DGraph | None = None

    def __call__(self, graph: DGraph, step: int) -> DGraph:
        """Return what the strategy does."""
        self.graph = self._strategy(graph, step)
        return self.graph


def strategy_error(name: str, step: int, problem: str) -> StrategyError:
    """Return the error of a strategy that cannot plan a step."""
    return StrategyError(
        f"strategy {name} at step {step}: {problem}: mend it, or use a built-in one "
        f"({', '.join(sorted(STRATEGIES))})",
        strategy=name,
        step=step,
    )


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
