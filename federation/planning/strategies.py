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


def unbalanced(graph: DGraph, step: int) -> DGraph:  # noqa: ARG001 - the form every strategy has
    """Deal rows as they were packed; the cost is only reported."""
    return graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)


STRATEGIES: dict[str, Strategy] = {"balanced": balanced, "unbalanced": unbalanced}


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
