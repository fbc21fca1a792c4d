"""A Ray cluster on this computer, run as a program until its stdin ends; the line "remove" ends its second node.

Arguments: the folder for Ray's files, which must have a short path; then for each further node a folder that is put
into its PYTHONPATH, or "-".
"""

import os
import sys

os.environ.update(RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0")

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    folder, *further = sys.argv[1:]
    os.makedirs("/tmp/ray", exist_ok=True)  # Ray writes the address there, too, but makes the folder only without `temp_dir`
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, env_vars={} if path == "-" else {"PYTHONPATH": path}) for path in further]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(nodes[0], allow_graceful=False)
            print("removed", flush=True)
    cluster.shutdown()
