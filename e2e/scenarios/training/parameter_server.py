"""A training of TensorFlow: its workers count steps in a variable of the parameter server.

Each step also returns its worker's host name, so that both are seen to work.
"""

import sys

import tensorflow as tf

STEPS = 40
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in {"worker", "ps"}:
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0, dtype=tf.int64)


@tf.function  # type: ignore[untyped-decorator]
def step() -> tf.Tensor:
    """Count, and return the name of the worker that does it."""
    total.assign_add(1)
    return tf.io.read_file("/etc/hostname")


results = [coordinator.schedule(step) for _ in range(STEPS)]
coordinator.join()
hosts = sorted({result.fetch().decode().strip() for result in results})
where = tf.DeviceSpec.from_string(total.device).job
sys.stdout.write(f"total={int(total.numpy())} of={where} hosts={','.join(hosts)}\n")
