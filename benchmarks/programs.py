"""Every program that six models compile, kept as text and compared.

A change of structure changes no program: save before it, compare after it.

    ./run bench programs --save benchmarks/results/programs
    ./run bench programs --compare benchmarks/results/programs

Each of six models (an MLP, a CNN with BatchNormalization and Dropout, a
transformer in mixed_bfloat16, a masked LSTM, a GAN with two optimizers, loss
scaling with accumulation) is trained, evaluated, asked for predictions and run
in a loop of its own, with even and indivisible batches, one step an execution
and 20. Compared are the programs as JAX lowers them and as XLA compiles them,
their number and order, and the numbers of each part, bit for bit. What names a
program, a function in it, an argument or a line of source is left out.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from program_models import MODELS
from program_texts import differences, normal_hlo, normal_stablehlo

HERE = pathlib.Path(__file__).parent
SECONDS = 1200


def list_programs(model, devices):
    """What a model's process compiles and prints.

    Returns:
      {file name: text}.
    """
    with tempfile.TemporaryDirectory() as directory:
        lowered, compiled = f"{directory}/lowered", f"{directory}/compiled"
        flags = (
            f"--xla_force_host_platform_device_count={devices} "
            f"--xla_dump_to={compiled} --xla_dump_hlo_as_text "
            "--xla_dump_hlo_module_re=.*"
        )
        environment = os.environ | {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "JAX_DUMP_IR_TO": lowered,
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONHASHSEED": "0",
            "XLA_FLAGS": flags,
        }
        command = [sys.executable, str(HERE / "program_models.py"), model]
        ended = subprocess.run(
            [*command, "--devices", str(devices)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"{model} failed:\n{ended.stderr[-4000:]}")
        texts = {f"{model}/numbers.jsonl": ended.stdout}
        for kind, names, normal in (
            ("lowered", sorted_files(lowered, "*.mlir"), normal_stablehlo),
            (
                "compiled",
                sorted_files(compiled, "*cpu_after_optimizations.txt"),
                normal_hlo,
            ),
        ):
            for k, path in enumerate(names):
                text = normal(path.read_text("utf-8"))
                texts[f"{model}/{kind}_{k:03}.txt"] = text
        return texts


def sorted_files(directory, pattern):
    """The files in the order that they were made."""

    def number(path):
        return [int(n) for n in re.findall(r"\d+", path.name)][:1]

    return sorted(pathlib.Path(directory).glob(pattern), key=number)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=pathlib.Path, metavar="DIRECTORY")
    what.add_argument("--compare", type=pathlib.Path, metavar="DIRECTORY")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS]
    )
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda model: list_programs(model, args.devices), args.models
        )
        texts = {k: v for each in found for k, v in each.items()}
    if args.save:
        shutil.rmtree(args.save, ignore_errors=True)
        for name, text in texts.items():
            path = args.save / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        print(f"{len(texts)} texts saved in {args.save}")
        return
    before = {
        path.relative_to(args.compare).as_posix(): path.read_text("utf-8")
        for model in args.models
        for path in sorted((args.compare / model).glob("*"))
    }
    if not before:
        raise SystemExit(f"Nothing is saved in {args.compare}: --save first.")
    found = list(differences(before, texts))
    print("\n\n".join(found) or f"{len(texts)} texts are as they were.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
