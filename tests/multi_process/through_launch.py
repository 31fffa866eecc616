"""What test_through_launch.py starts: `python -m ... DIRECTORY`.

Trains in all ways, as a user's script would, and writes the numbers of this
process to the directory.
"""

import json
import pathlib
import sys

import jax

import keras_strategies as ks
from tests.multi_process import custom_loops, scenarios

ROWS, SIZE = 21, 8


def main():
    # Joins the job, as TF_CONFIG says; the others are in it then.
    strategy = ks.MultiWorkerMirroredStrategy()
    x, _ = scenarios.data(ROWS)
    rows = strategy.experimental_make_numpy_dataset(x).batch(SIZE)
    dataset = strategy.experimental_distribute_dataset(rows)
    first = next(iter(dataset))
    found = {
        "loops": scenarios.loops(["arrays"], [(ROWS, SIZE, 1), (30, 8, 3)]),
        "loop": custom_loops.train(ROWS),
        "local": [
            len(part) for part in strategy.experimental_local_results(first)
        ],
        "replicas": strategy.num_replicas_in_sync,
        "task": strategy.cluster_resolver.task_id,
    }
    path = pathlib.Path(sys.argv[1]) / f"{jax.process_index()}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
