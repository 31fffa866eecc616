"""Large train steps for TPUs beside the best programs of raw JAX.

    ./run bench large_steps
    ./run bench large_steps recommender gemma --peers ours columns
    ./run bench large_steps lstm gru --full-effort
    ./run bench large_steps words-llama  # needs keras-hub

Compiled on a CPU machine, with libtpu, for a real TPU topology, one after the
other: GB of arguments and temporaries of a chip, MB that it sends by the kind
of collective, and the milliseconds that plans estimate for each program.
Compare programs of one case, not times with a clock.
"""

import os
import pathlib
import sys

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
sys.path.append(str(pathlib.Path(__file__).parents[2]))

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks.large_steps import decoders, loops, recommender, tables

CASES = tables.CASES | recommender.CASES | loops.CASES | decoders.CASES


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peers", nargs="+", help="those of a case")
    parser.add_argument("--full-effort", action="store_true")
    arguments = parser.parse_args()
    columns = "case", "peer", "arguments, GB", "temporaries, GB", "ms"
    table = Table(*columns, "links, ms", "sent, MB")
    for name in arguments.cases or CASES:
        for peer in arguments.peers or CASES[name].peers:
            found = CASES[name].measure(peer, is_low=not arguments.full_effort)
            table.add_row(name, peer, *found.cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
