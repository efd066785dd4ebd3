"""Push and pull with a Ray actor: .peers/ray/bin/python benchmarks/scripts/push_ray.py --replicas 2

Replicas are actors too, so each has its own process. Arrays are numpy's, which Ray keeps in shared memory and reads
there without a copy. A step is one call, there with the gradient and back with the parameters.

With `--apart` the server is on another node of a cluster, as it would be on another machine: arrays go there by TCP.
"""

import os

import numpy as np
import ray
from push import LR, check, meet, parse, times_of
from ray.cluster_utils import Cluster
from stopwatch import Stopwatch


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, count):
        self.weight = np.zeros(count, np.float32)
        self.change = np.empty(count, np.float32)

    def push_pull(self, gradient):
        np.multiply(gradient, np.float32(LR), out=self.change)  # in place: numpy has no multiply and add in one
        self.weight -= self.change
        return self.weight

    def largest(self):
        return float(self.weight.max())


@ray.remote(num_cpus=0)
class Replica:
    def __init__(self, server, count):
        self.server = server
        self.gradient = np.ones(count, np.float32)

    def train(self, options, number):
        meet(options, number, options.replicas)
        watch = Stopwatch(times_of(options, number))
        for _ in range(options.steps):
            weight = ray.get(self.server.push_pull.remote(self.gradient))
            watch.step()
        assert weight.shape == self.gradient.shape


def main():
    parser = parse(__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="the server on another node than the replicas")
    options = parser.parse_args()
    count = options.bytes // 4
    node = {"num_cpus": os.cpu_count(), "object_store_memory": max(1 << 30, 16 * options.bytes)}
    cluster = Cluster(True, head_node_args={**node, "include_dashboard": False, "resources": {"replicas": 1}})
    if options.apart:
        cluster.add_node(**node, resources={"server": 1})
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here}},  # where the actors find the modules beside this one
    )
    server = Server.options(resources={"server" if options.apart else "replicas": 0.01}).remote(count)
    replicas = [Replica.options(resources={"replicas": 0.01}).remote(server, count) for _ in range(options.replicas)]
    ray.get([replica.train.remote(options, number) for number, replica in enumerate(replicas)])
    check(ray.get(server.largest.remote()), options.replicas * options.steps)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
