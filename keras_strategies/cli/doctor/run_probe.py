"""Runs `probe` in child processes and derives findings from its answers."""

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_strategies.cli.doctor.clusters import Cluster
from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    good,
    problem,
)
from keras_strategies.cli.launch.local_job import describe_exit
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.cluster.user_code import make_command_line
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_PROBE = "keras_strategies.cli.doctor.probe"
# The time limit for JAX to start its devices, which takes long on large slices.
_DEVICES_S = 150.0
_LAST_LINES = 3
_MAX_LINE = 1 << 20
_MAX_CHARACTERS = 600
_NAMES = {
    "jax": "JAX was imported",
    "join": "the processes were connected",
    "devices": "JAX had started its devices",
    "all_reduce": "the all-reduce was complete",
    "keras": "keras_strategies was imported",
}
_FIXES = {
    "join": (
        "Run doctor in all processes at the same time, for example with `srun "
        "keras-strategies doctor`, with `torchrun -m keras_strategies.cli "
        "doctor` or in all pods. To check only this process, run `doctor "
        "--quick`."
    ),
    "devices": (
        "If JAX_PLATFORMS or XLA_FLAGS is set, correct or unset it: JAX needs "
        "support for the platform (in a clone of the project: `pip install "
        "'.[cuda]'` or `'.[tpu]'`), and XLA aborts the process if it does not "
        "know a flag (flags for TPUs belong in LIBTPU_INIT_ARGS). Check the "
        "drivers of the devices, and whether other processes use them. To use "
        "the CPU instead, set JAX_PLATFORMS=cpu."
    ),
    "all_reduce": (
        "Processes must be able to reach each other on all ports, not only on "
        "the coordinator's port. Check for a firewall between them."
    ),
}
_REINSTALL = "Reinstall the packages that this report lists as problems."
Answers = dict[str, dict[str, Any]]
"""The answers that `probe` has printed, by the name of the stage."""


def check_jax(
    title: str,
    cluster: Cluster | None,
    environ: Mapping[str, str],
    timeout_s: float,
) -> tuple[Part, bool]:
    """Checks JAX, its devices and an all-reduce over them.

    Args:
      title: The title of the part.
      cluster: A cluster of several processes, or one that only JAX can detect,
        whose job is joined (then the call is collective); None for this machine
        alone.
      environ: The environment variables.
      timeout_s: The time to wait for the other processes, in seconds.

    Returns:
      A tuple of this part of the report and whether JAX found devices.
    """
    stages = ["jax", "devices", "all_reduce", "keras"]
    join, over = None, "this machine's devices"
    if cluster is not None:
        stages.insert(1, "join")
        join, over = cluster.info, "all processes"
    answers, end = _probe(stages, join, timeout_s, environ)
    devices, sums = answers.get("devices", {}), answers.get("all_reduce", {})
    rows = []
    if "kinds" in devices:
        rows.append(("processes", str(devices["num_processes"])))
        rows.append(("devices", "\n".join(devices["kinds"])))
    if "took" in sums:
        rows.append(("all-reduce, 4 MiB", str(sums["took"])))
    findings = []
    if "seconds" in answers.get("join", {}):
        findings.append(
            good("All processes have connected, and JAX has started the job.")
        )
    if sums.get("is_right"):
        findings.append(good(f"An all-reduce over {over} is correct."))
    elif "is_right" in sums:
        findings.append(
            problem(
                f"An all-reduce over {over} returns a wrong sum.",
                "Do not train on these devices. Check whether a device or a "
                "link between devices is broken.",
            )
        )
    findings += _check_end(answers, end)
    part = Part(title=title, rows=tuple(rows), findings=tuple(findings))
    return part, "kinds" in devices


def _probe(
    stages: Sequence[str],
    join: TaskInfo | None,
    timeout_s: float,
    environ: Mapping[str, str],
) -> tuple[Answers, tuple[int | None, str]]:
    """Runs stages of `probe` in a child process.

    Returns:
      A tuple of the answers of the stages, of which the last is empty if it did
      not end; and a tuple of the exit status (None after the time limit) and
      the last lines of the child's stderr.
    """
    question = {
        "stages": stages,
        "join": join and dataclasses.asdict(join),
        "timeout_s": timeout_s,
    }
    added = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "1"}
    dropped = (LAUNCHER_FD, "KERAS_NNX_ENABLED")
    inherited = {k: v for k, v in environ.items() if k not in dropped}
    try:
        ended = subprocess.run(
            make_command_line(_PROBE, json.dumps(question)),
            env=inherited | added,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s + _DEVICES_S,
        )
        code, printed, text = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as late:
        code, printed, text = None, late.stdout or b"", late.stderr or b""
    answers = _parse_answers(printed)
    if len(answers) < len(stages) and not any(
        "error" in answer for answer in answers.values()
    ):
        answers[stages[len(answers)]] = {}
    lines = text.decode(errors="replace").splitlines()
    last = [line for line in lines if line.strip()][-_LAST_LINES:]
    return answers, (code, "\n".join(last)[:_MAX_CHARACTERS])


def _parse_answers(text: bytes) -> Answers:
    """Parses the lines of JSON among a child's output."""
    answers: Answers = {}
    for line in text.splitlines():
        # A line is cut off after the time limit.
        with contextlib.suppress(ValueError):
            if line.startswith(b'{"stage": '):
                answer = load_json(line, max_characters=_MAX_LINE)
                answers[str(answer.pop("stage"))] = answer
    return answers


def _check_end(
    answers: Answers, end: tuple[int | None, str]
) -> Iterator[Finding]:
    """Yields a finding about the last stage if that stage failed."""
    code, text = end
    if code == 0:
        return
    stage = list(answers)[-1] if answers else "jax"
    answer, before = answers.get(stage, {}), f"before {_NAMES[stage]}"
    if "error" in answer:
        kind = answer.get("kind", "an error")
        what = f"{kind} was raised {before}: {answer['error']}"
    else:
        # XLA aborts its own process. "Killed" would suggest that another
        # process did it.
        how = "The time limit ended"
        if code is not None:
            exit_text = describe_exit(code)
            how = f"The process {exit_text.replace('was killed', 'was ended')}"
        what = f"{how} {before}." + f" Its last output: {text}" * bool(text)
    yield problem(what, _FIXES.get(stage, _REINSTALL))
