"""A Ray cluster of two nodes on this computer, run as a program until its stdin ends; the line "remove" ends a node."""

import os
import sys

os.environ.update(RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0")

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(second, allow_graceful=False)
            print("removed", flush=True)
    cluster.shutdown()
