"""Push and pull with a Ray actor: .peers/ray/bin/python benchmarks/scripts/push_ray.py --replicas 2

Replicas are actors too, so each has its own process. Arrays are numpy's, which Ray keeps in shared memory and reads
there without a copy. A step is one call, there with the gradient and back with the parameters.
"""

import os

import numpy as np
import ray
from push import LR, check, meet, parse, times_of
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
    options = parser.parse_args()
    count = options.bytes // 4
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=max(1 << 30, 16 * options.bytes),
        runtime_env={"env_vars": {"PYTHONPATH": here}},  # where the actors find the modules beside this one
    )
    server = Server.remote(count)
    replicas = [Replica.remote(server, count) for _ in range(options.replicas)]
    ray.get([replica.train.remote(options, number) for number, replica in enumerate(replicas)])
    check(ray.get(server.largest.remote()), options.replicas * options.steps)
    ray.shutdown()


if __name__ == "__main__":
    main()
