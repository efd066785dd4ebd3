"""A Ray cluster of three nodes on this machine, until stdin ends. A line there, the pids of a run's agents by host, has
one of their nodes killed, that is neither the head's nor host 0's; the answer is which host it was. After that another
node is added, and an empty line is answered when it is there."""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil
from clusters import CORES, NODES

SIZE = {"num_cpus": CORES, "object_store_memory": 80 << 20}


def say(said: object) -> None:
    print(json.dumps({"said": said}), flush=True)


def raylet(node: object) -> int:
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    return int(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)  # type: ignore[attr-defined]


def added(cluster: Any) -> object:
    """One more node. On a busy machine Ray gives up a start early."""
    for _ in range(9):
        try:
            return cluster.add_node(**SIZE)
        except Exception as error:
            print(error, file=sys.stderr)
    return cluster.add_node(**SIZE)


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
    nodes = [added(cluster) for _ in range(NODES - 1)]
    say(cluster.address)
    for line in sys.stdin:
        if not line.strip():
            say("ready")
            continue
        for host, pid in sorted(json.loads(line).items(), reverse=True):
            above = {parent.pid for parent in psutil.Process(pid).parents()}
            there = [node for node in nodes if raylet(node) in above]
            if host != "0" and there:
                nodes.remove(there[0])
                cluster.remove_node(there[0], allow_graceful=False)
                say(host)
                nodes.append(added(cluster))
                break
    cluster.shutdown()


if __name__ == "__main__":
    main()
