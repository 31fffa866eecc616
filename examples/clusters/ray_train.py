"""Trains on the workers of Ray Train, and goes on when one of them is lost.

    pip install 'ray[train]'
    python ray_train.py                     # 2 workers on CPU cores
    python ray_train.py --workers 8 --gpu   # a GPU each, of Ray's cluster

Every worker is a process of the job. Ray says which one it is; where all meet
is said by the first. A worker that is lost ends the others, Ray starts all of
them again (`--failures` times), and `ks.callbacks.Checkpoint` goes on at the
step that was saved last: `--directory` is one that all machines share. Compiled
programs are cached in the home directory; if the machines do not share it, set
JAX_COMPILATION_CACHE_DIR to another directory.
"""

import argparse
import os
import pathlib
import socket


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU a worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--failures", type=int, default=3)
    parser.add_argument("--directory", default="ray_run")
    parser.add_argument(
        "--lose-a-worker", action="store_true", help="once, to see it"
    )
    return parser.parse_args()


def train(config):
    """What each worker does. Ray pickles it, so it imports what it uses."""
    os.environ["JAX_PLATFORMS"] = "cuda" if config["gpu"] else "cpu"
    import ray
    from ray.train import collective, get_context

    import keras_strategies as ks  # Before keras: chooses its JAX backend.

    context = get_context()
    place = {
        "num_processes": context.get_world_size(),
        "process_id": context.get_world_rank(),
    }
    if config["gpu"]:
        # Ray has called `jax.distributed.initialize`.
        strategy = ks.MultiWorkerMirroredStrategy()
    else:
        with socket.socket() as server:
            server.bind(("", 0))
            port = server.getsockname()[1]
        address = f"{ray.util.get_node_ip_address()}:{port}"
        # Of all that is said here the first worker's counts.
        address = collective.broadcast_from_rank_zero(address)
        strategy = ks.MultiWorkerMirroredStrategy(
            coordinator_address=address, **place
        )
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(1000, 8)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    directory = pathlib.Path(config["directory"])
    callbacks = [ks.callbacks.Checkpoint(directory / "checkpoints")]
    if config["lose_a_worker"] and place["process_id"] == 1:
        callbacks += [lost_once(directory / "lost")]
    history = model.fit(
        x,
        y,
        batch_size=100,
        epochs=config["epochs"],
        verbose=0,
        callbacks=callbacks,
    )
    loss, accuracy = model.evaluate(x, y, batch_size=100, verbose=0)
    if place["process_id"] == 0:
        said = (
            f"{place['num_processes']} processes, "
            f"{strategy.num_replicas_in_sync} replicas, epochs "
            f"{history.epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}"
        )
        (directory / "result.txt").write_text(said)


def lost_once(mark):
    """A callback that ends its process in the third epoch, the first time."""
    import keras

    def on_epoch_begin(epoch, logs=None):
        if epoch == 2 and not mark.exists():
            mark.write_text("")
            os._exit(1)

    return keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)


def main():
    options = parse()
    directory = pathlib.Path(options.directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    trainer = JaxTrainer(
        train,
        train_loop_config=vars(options) | {"directory": str(directory)},
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=options.gpu
        ),
        run_config=RunConfig(
            storage_path=str(directory / "ray"),
            failure_config=FailureConfig(max_failures=options.failures),
        ),
    )
    trainer.fit()
    print((directory / "result.txt").read_text())


if __name__ == "__main__":
    main()
