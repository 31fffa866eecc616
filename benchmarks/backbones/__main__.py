"""How much of each keras-hub transformer the cores of a replica share.

    ./run bench backbones                   # all, over 4 cores
    ./run bench backbones Bert Gemma --cores 8

Builds each backbone without values, from the sizes of a published preset
(configs.py): nothing is downloaded. Prints a table in Markdown: the bytes of
its weights, the share that `ks.experimental.transformer_layout` divides, and
what stays whole.
"""

import argparse
import os
import pathlib
import sys
import warnings

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.append(str(pathlib.Path(__file__).parents[2]))

import keras

from benchmarks.backbones.configs import OTHERS, TEXT
from benchmarks.backbones.survey import SHOWN_SHARE, Survey, survey

MAX_SHOWN = 3


def format_row(found: Survey) -> str:
    whole = "; ".join(
        f"`{w.name}` {w.share:.1%} ({w.why})"
        for w in found.whole[:MAX_SHOWN]
        if w.share >= SHOWN_SHARE
    )
    size = f"{found.size / 1e6:,.0f}"
    return f"| {found.name} | {size} | {found.divided:.1%} | {whole} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--cores", type=int, default=4)
    arguments = parser.parse_args()
    # Of keras-hub, and of the layouts: the table says the same.
    warnings.simplefilter("ignore")
    print("| backbone | MB | divided | whole |\n|---|---|---|---|")
    for name in arguments.names or [*TEXT, *OTHERS]:
        keras.backend.clear_session()
        try:
            print(format_row(survey(name, arguments.cores)), flush=True)
        except ValueError as error:
            print(f"| {name} | | refused | {error} |", flush=True)


if __name__ == "__main__":
    main()
