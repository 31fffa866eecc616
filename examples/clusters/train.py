"""Trains a small model on all processes of a cluster; the same on each.

Prints the result in the chief, and asserts that the loss has halved. One line
differs between clusters, the strategy's; here an option chooses it.

    python train.py                                    # this machine
    keras-strategies launch --processes 2 train.py     # two local processes
    python train.py --cluster slurm                    # see the recipes

Ends with the exit codes of docs/clusters.md: 0 when done, 75 when the job was
told to stop (SIGTERM) and may be started again, another one for a failure.
"""

import argparse
import os

import keras_strategies as ks  # Before keras: chooses its JAX backend.


def tf_config():
    """TF_CONFIG, and alone without one."""
    return ks.MultiWorkerMirroredStrategy()


def slurm():
    """The tasks of `srun`. Jobs that share a host must not share a port."""
    port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
    resolver = ks.cluster_resolver.SlurmClusterResolver(port_base=port)
    return ks.MultiWorkerMirroredStrategy(resolver)


def kubernetes():
    """The pods of a JobSet or an indexed Job."""
    resolver = ks.cluster_resolver.KubernetesClusterResolver()
    return ks.MultiWorkerMirroredStrategy(resolver)


def torchrun():
    """What torchrun starts."""
    resolver = ks.cluster_resolver.TorchrunClusterResolver()
    return ks.MultiWorkerMirroredStrategy(resolver)


def tpu():
    """A TPU slice: TPU VMs, or pods of GKE that JAX finds by itself."""
    return ks.TPUStrategy(ks.cluster_resolver.TPUClusterResolver())


STRATEGIES = {
    f.__name__: f for f in (tf_config, slurm, kubernetes, torchrun, tpu)
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", choices=STRATEGIES, default="tf_config")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--checkpoints",
        metavar="DIRECTORY",
        help="on a disk that all hosts share; to resume after a restart",
    )
    return parser.parse_args()


def load(rows):
    """Points of two interleaved spirals; a seed makes all processes agree."""
    import numpy as np

    random = np.random.default_rng(0)
    angle = random.uniform(0.5, 6.0, rows)
    label = random.integers(0, 2, rows)
    turned = angle + np.pi * label
    x = angle[:, None] * np.stack([np.cos(turned), np.sin(turned)], 1) / 6.0
    x += random.normal(scale=0.02, size=x.shape)
    return x.astype("float32"), label.astype("int32")


def build():
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(2),
        ]
    )


def main():
    options = parse()
    # Before anything else that uses JAX: it starts the cluster.
    strategy = STRATEGIES[options.cluster]()
    import jax
    import keras

    x, y = load(options.rows)
    with strategy.scope():
        model = build()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    before = model.evaluate(x, y, batch_size=64, verbose=0)[0]
    callbacks = []
    if options.checkpoints:
        callbacks += [
            ks.callbacks.Checkpoint(options.checkpoints),
            ks.callbacks.RunReport(),
        ]
    model.fit(
        x,
        y,
        batch_size=64,
        epochs=options.epochs,
        verbose=0,
        callbacks=callbacks,
    )
    loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, "
            f"{strategy.num_replicas_in_sync} replicas: "
            f"loss {before:.4f} -> {loss:.4f}, accuracy {accuracy:.3f}"
        )
    assert loss < before / 2, f"the loss went from {before} to {loss}"


if __name__ == "__main__":
    main()
