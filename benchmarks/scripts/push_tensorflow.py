"""Push and pull with TensorFlow's ParameterServerStrategy, over gRPC.

    python push_tensorflow.py --cluster '{"chief": […], "ps": […], "worker": […, …]}' --task chief --index 0

One process a task. The chief schedules steps, the workers take the next one each when they have ended one. A step
reads the variable, which is the pull, and applies plain SGD to it where it is, with a gradient from the worker.
"""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf
from push import LR, check, parse, times_of
from stopwatch import Stopwatch


def main():
    parser = parse(__doc__)
    parser.add_argument("--cluster", type=json.loads, required=True)
    parser.add_argument("--task", choices=["chief", "ps", "worker"], required=True)
    parser.add_argument("--index", type=int, default=0)
    options = parser.parse_args()
    cluster = tf.train.ClusterSpec(options.cluster)
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    if options.task != "chief":
        server = tf.distribute.Server(
            cluster, job_name=options.task, task_index=options.index, protocol="grpc", config=threads, start=True
        )
        server.join()  # for ever: whoever started this ends it
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc", task_type="chief", task_id=0
    )
    train(options, resolver, replicas=len(options.cluster["worker"]))


def train(options, resolver, replicas):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    count = options.bytes // 4
    with strategy.scope():
        weight = tf.Variable(tf.zeros([count]), dtype=tf.float32)

    @tf.function
    def step():
        pulled = weight.read_value()
        gradient = tf.ones([count])  # on the worker
        with tf.control_dependencies([pulled]):
            # What was pulled has to arrive, so something is computed with it: one element, on the worker.
            used = pulled[0]
        with tf.control_dependencies([used]):
            tf.raw_ops.ResourceApplyGradientDescent(var=weight.handle, alpha=LR, delta=gradient)
        return used

    total = replicas * options.steps
    values = [coordinator.schedule(step) for _ in range(total)]
    watch = Stopwatch(times_of(options, 0))
    for value in values:
        value.fetch()
        watch.step()  # the steps of all workers, in order
    coordinator.join()
    check(float(tf.reduce_max(weight)), total)
    os._exit(0)  # its threads wait for a cluster that is about to be ended


if __name__ == "__main__":
    main()
