"""A cluster's planner as a process: `python -m tests.support.planner_process NAME ENDPOINT STATE_DIR STORE`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from federation.cluster_hello import PlannerHello
from federation.cluster_router import ClusterRouter
from federation.cluster_service import ClusterService
from federation.planner_config import PlannerConfig
from federation.planner_life import Standing
from federation.planner_main import run_planner


def main(name: str, listen: str, state_dir: str, store: str) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    config = PlannerConfig(name, listen, store, Path(state_dir))

    def announce(router: ClusterRouter, standing: Standing) -> None:
        router.set_hello(PlannerHello(name, standing.leads, standing.term, standing.leader))

    run_planner(
        config,
        lambda config: ClusterRouter(config.listen, hello=PlannerHello(name, False, 0)),
        announce,
        ClusterService,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
