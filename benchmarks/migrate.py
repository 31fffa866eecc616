"""Ports public scripts, and runs what is ported on random data.

tests/migrate/scripts.txt lists the scripts, by their address and commit. They
are not copied into the project: download those that you want to try, with the
modules beside them, into a directory, as OWNER+REPOSITORY/PATH. A line that
ends in "run" is a script that was read, and needs no data but what is random
here; others are only ported.

    ./run bench migrate DIRECTORY [WORDS...]

With words, only scripts whose address has one of them are run. A script runs
twice, in a temporary directory and without the network: on four virtual CPU
devices (in two processes of two, if it has a MultiWorkerMirroredStrategy) and
on one, with the same global batch. The first three losses of each run are
compared: those after each batch of `fit`, or those that a loop prints.

What the runs change beside the data and the number of steps: devices that a
machine may not have are left out, layers drop nothing, and batches are
normalized by moving averages, so that one device computes the same.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
LIST = ROOT / "tests" / "migrate" / "scripts.txt"
LIMIT_S = 300
NUM_REPLICAS, NUM_PROCESSES = 4, 2
TOLERANCE = 2e-4
# Numbers in scripts that depend on the machine, or on the size of the data.
NUMBERS = {
    r"\w*strategy\.num_replicas_in_sync": str(NUM_REPLICAS),
    r"len\(tf_config\[.cluster.\]\[.worker.\]\)": str(NUM_PROCESSES),
    r"\b73257\b": "192",
    r"\[224, 224\]": "[32, 32]",
    r"Conv2D\(512,": "Conv2D(16,",
    r"MobileNetV2\(": "MobileNetV2(input_shape=(32, 32, 3), ",
}
# What migrate_data.py prints in `fit`, and what scripts print of their loops.
_BATCH_LOSS = re.compile(r"\bbatch loss: (\S+)")
_LOSS = re.compile(r"\bloss\b:? ?(\d+\.\d+(?:e-?\d+)?)", re.I)


def read_list():
    """Yields the owner and repository, the path, and whether to run it."""
    for line in LIST.read_text("utf-8").splitlines():
        match = re.match(
            r"https://github.com/([^/]+/[^/]+)/blob/\w{40}/(\S+)( run)?$", line
        )
        if match:
            yield match[1].replace("/", "+"), match[2], bool(match[3])


def port(directory, repository, path):
    """Ports a script with the files beside it.

    Returns:
      The port, the lines changed in it, and the texts about those left in it.
    """
    from keras_strategies.migrate.project import find_files, port_files

    target = pathlib.Path(tempfile.mkdtemp()) / repository
    shutil.copytree(directory / repository, target)
    script = target / path
    files = find_files([str(script.parent)])
    reports = port_files(files)
    for report in reports:
        report.write()
    (report,) = [each for each in reports if each.path == str(script)]
    return script, report.num_changed, [text for _, text in report.left]


def run(script, *, devices):
    """Runs a ported script in a copy of its directory.

    Returns:
      What became of it, and its first three losses.
    """
    text = script.read_text("utf-8")
    for pattern, number in NUMBERS.items():
        text = re.sub(pattern, number, text)
    directory = pathlib.Path(tempfile.mkdtemp()) / "script"
    shutil.copytree(script.parent, directory)
    (directory / script.name).write_text(text, "utf-8")
    has_workers = re.search(r"^[^#\n]*MultiWorker", text, re.M) is not None
    is_job = has_workers and devices > 1
    child = [str(ROOT / "benchmarks" / "migrate_data.py"), script.name]
    command = [sys.executable, *child]
    if is_job:
        each = str(devices // NUM_PROCESSES)
        command = [
            *(sys.executable, "-m", "keras_strategies.cli", "launch"),
            *("--processes", str(NUM_PROCESSES)),
            *("--devices-per-process", each, *child),
        ]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    if has_workers and not is_job:
        cluster = {"worker": ["localhost:1"]}
        task = {"type": "worker", "index": 0}
        config = {"cluster": cluster, "task": task}
        environment["TF_CONFIG"] = json.dumps(config)
    if not is_job:
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = flags
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_S} s", []
    found = _BATCH_LOSS.findall(done.stdout) or _LOSS.findall(done.stdout)
    losses = [float(loss) for loss in found[:3]]
    if not done.returncode:
        return "runs", losses
    text = done.stdout + done.stderr
    errors = re.findall(r"^(?:\[.*\] )?\w*(?:Error|Exception): .*", text, re.M)
    return f"fails: {[*errors, text[-150:]][0][:150]}", losses


def compare(script):
    """Runs a script on several devices and on one; returns two columns."""
    result, losses = run(script, devices=NUM_REPLICAS)
    if result != "runs":
        return result, ""
    other, expected = run(script, devices=1)
    if other != "runs" or not losses:
        return result, f"not known: {other}, {len(losses)} losses"
    gap = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    word = "equal" if gap < TOLERANCE else "**differ**"
    return result, f"{word}: {len(losses)}, by {gap:.0e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    print("| script | lines changed | left | run | losses |")
    print("|---|---|---|---|---|")
    for repository, path, is_run in read_list():
        if not (options.directory / repository / path).exists():
            continue
        is_chosen = any(w in f"{repository}/{path}" for w in options.words)
        if options.words and not is_chosen:
            continue
        script, changed, left = port(options.directory, repository, path)
        result, losses = "-", "-"
        if is_run and not left:
            result, losses = compare(script)
        name = f"{repository.replace('+', '/')}/{path}"
        row = (name, str(changed), str(len(left)), result, losses)
        print(f"| {' | '.join(row)} |", flush=True)
        for text in left:
            print(f"    {text}")


if __name__ == "__main__":
    main()
