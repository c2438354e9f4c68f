"""A Ray cluster of two nodes on this machine, in a process of its own: `python -m tests.support.ray_nodes`.

Prints its address and lives until its standard input closes.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def main() -> None:
    """See the module's text."""
    given = {"num_cpus": 4, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=given)
    try:
        cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES)
        print(f"address {cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
