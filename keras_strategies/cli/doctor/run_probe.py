"""Runs `probe` in child processes and derives findings from its answers."""

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_strategies.cli.doctor.clusters import Cluster, check_address
from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    good,
    note,
    problem,
)
from keras_strategies.cli.doctor.installed import DEVICE_COUNT
from keras_strategies.cli.launch.local_job import describe_exit
from keras_strategies.cluster.exchange.rendezvous import RendezvousError
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.cluster.user_code import make_command_line
from keras_strategies.gpu.xla_flags import is_deterministic
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_PROBE = "keras_strategies.cli.doctor.probe"
# The time limit for JAX to start its devices, which takes long on large slices.
_DEVICES_S = 90.0
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
_TIMED = {
    "jax": "import jax",
    "devices": "start devices",
    "keras": "import keras_strategies",
}
Answers = dict[str, dict[str, Any]]
"""The answers that `probe` has printed, by the name of the stage."""


def check_devices(
    environ: Mapping[str, str], *, is_alone: bool
) -> tuple[Part, bool]:
    """Checks JAX, this machine's devices and an all-reduce over them.

    Args:
      environ: The environment variables.
      is_alone: Whether this process is not part of a cluster.

    Returns:
      A tuple of this part of the report and whether JAX found devices.
    """
    stages = ["jax", "devices", "all_reduce", "keras"]
    answers, end = _probe(stages, None, _DEVICES_S, environ)
    rows = list(_make_rows(answers, environ))
    for stage, name in _TIMED.items():
        if "seconds" in answers.get(stage, {}):
            rows.append((name, f"{answers[stage]['seconds']:.1f} s"))
    kinds = answers.get("devices", {}).get("kinds")
    findings = [_check_kinds(kinds)] if kinds and is_alone else []
    findings += _check_all_reduce(answers, "this machine's devices")
    findings += _check_end(answers, end, environ)
    part = Part(title="Devices", rows=tuple(rows), findings=tuple(findings))
    return part, bool(kinds)


def check_job(
    cluster: Cluster, environ: Mapping[str, str], timeout_s: float
) -> Part:
    """Joins the job, checks it and times an all-reduce over it. Collective.

    Args:
      cluster: A cluster of several processes, or one that only JAX can detect.
      environ: The environment variables.
      timeout_s: The time to wait for the other processes, in seconds.
    """
    join = cluster.info and dataclasses.asdict(cluster.info)
    stages = ["jax", "join", "devices", "all_reduce"]
    answers, end = _probe(stages, join, timeout_s, environ)
    rows, findings = [], []
    if "seconds" in answers.get("join", {}):
        findings.append(
            good("All processes have connected, and JAX has started the job.")
        )
    counts = answers.get("devices", {}).get("by_process")
    if counts:
        rows.append(("processes", str(len(counts))))
        rows.append(("machines", str(answers["devices"]["num_hosts"])))
        findings += _check_counts(counts)
    rows += _make_rows(answers, environ)
    findings += _check_all_reduce(answers, "all processes")
    findings += _check_meeting(answers, cluster, environ)
    findings += _check_end(answers, end, environ)
    return Part(title="Job", rows=tuple(rows), findings=tuple(findings))


def _probe(
    stages: Sequence[str],
    join: dict[str, Any] | None,
    timeout_s: float,
    environ: Mapping[str, str],
) -> tuple[Answers, tuple[int | None, str]]:
    """Runs stages of `probe` in a child process.

    Returns:
      A tuple of the answers of the stages, of which the last is empty if it did
      not end; and a tuple of the exit status (None after the time limit) and
      the last lines of the child's stderr.
    """
    question = {"stages": stages, "join": join, "timeout_s": timeout_s}
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


def _make_rows(answers: Answers, environ: Mapping[str, str]) -> Iterator[Row]:
    kinds = answers.get("devices", {}).get("kinds", ())
    if kinds:
        yield (
            "devices",
            "\n".join(
                f"{count} x {name}" + f" ({kind})" * (kind != name)
                for name, kind, count in kinds
            ),
        )
    if any(platform == "gpu" for platform, *_ in kinds):
        yield (
            "determinism",
            "on: runs are equal bit for bit"
            if is_deterministic(environ)
            else "off: runs differ by rounding (`ks.enable_determinism()`)",
        )
    for size, took, _ in answers.get("all_reduce", {}).get("sums", ()):
        yield f"all-reduce, {size}", took


def _check_kinds(kinds: Sequence[Sequence[Any]]) -> Finding:
    count, platform = sum(kind[2] for kind in kinds), kinds[0][0]
    if count > 1:
        return good(f"JAX has {count} devices.")
    is_cpu = platform == "cpu"
    return note(
        f"JAX has one {'CPU ' * is_cpu}device, so a strategy has one replica.",
        f"To try several replicas, set XLA_FLAGS={DEVICE_COUNT}4." * is_cpu,
    )


def _check_counts(counts: list[int]) -> Iterator[Finding]:
    if len(set(counts)) > 1:
        yield problem(
            "The processes have different numbers of devices: "
            f"{', '.join(map(str, counts))}.",
            "Use the same number of devices in all processes, because a "
            "strategy divides batches evenly.",
        )


def _check_all_reduce(answers: Answers, over: str) -> Iterator[Finding]:
    sums = answers.get("all_reduce", {}).get("sums", ())
    results = [is_right for _, _, is_right in sums]
    if results and all(results):
        yield good(f"An all-reduce over {over} is correct.")
    elif results:
        yield problem(
            f"An all-reduce over {over} returns a wrong sum.",
            "Do not train on these devices. Check whether a device or a link "
            "between devices is broken.",
        )


def _failed_to_meet(answers: Answers) -> bool:
    """Returns whether processes did not connect, or run different jobs."""
    return answers.get("join", {}).get("kind") == RendezvousError.__name__


def _check_meeting(
    answers: Answers, cluster: Cluster, environ: Mapping[str, str]
) -> Iterator[Finding]:
    if cluster.info is None or not _failed_to_meet(answers):
        return
    yield problem(
        "The processes cannot start a job together. "
        f"{answers['join']['error']}",
        "Run doctor in all processes at the same time, for example with `srun "
        "keras-strategies doctor`, with `torchrun -m keras_strategies.cli "
        "doctor` or in all pods. To check only this process, run `doctor "
        "--quick`.",
    )
    for finding in check_address(cluster.info, environ):
        if finding.fix:
            yield finding


def _check_end(
    answers: Answers, end: tuple[int | None, str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields a finding about the last stage if that stage failed."""
    code, text = end
    if code == 0 or _failed_to_meet(answers):
        return
    stage = list(answers)[-1] if answers else "jax"
    answer, before = answers.get(stage, {}), f"before {_NAMES[stage]}"
    if "error" in answer:
        kind = answer.get("kind", "an error")
        yield problem(
            f"{kind} was raised {before}: {answer['error']}",
            _choose_fix(stage, environ.get("JAX_PLATFORMS")),
        )
        return
    what = f"The time limit ended {before}."
    if code is not None:
        # XLA aborts its own process. "Killed" would suggest that another
        # process did it.
        how = describe_exit(code).replace("was killed by", "was ended by")
        what = f"The process {how} {before}."
    what += f" Its last output: {text}" * bool(text)
    fix = _choose_fix(stage, environ.get("JAX_PLATFORMS"))
    if code and stage == "devices" and environ.get("XLA_FLAGS"):
        fix = (
            "XLA aborts the process if XLA_FLAGS contains an unknown flag. "
            "Remove or correct this flag. Flags for TPUs belong in "
            "LIBTPU_INIT_ARGS."
        )
    yield problem(what, fix)


def _choose_fix(stage: str, platforms: str | None) -> str:
    if stage == "keras":
        return "Reinstall the packages that this report lists as problems."
    if stage == "devices" and platforms:
        return (
            f"JAX_PLATFORMS={platforms} selects devices that JAX does not "
            "find. Install support for them (in a clone of the project: `pip "
            "install '.[cuda]'` or `'.[tpu]'`), or set JAX_PLATFORMS=cpu."
        )
    if stage == "all_reduce":
        return (
            "Processes must be able to reach each other on all ports, not only "
            "on the coordinator's port. Check for a firewall between them."
        )
    return (
        "Check the drivers of the devices, and check whether other processes "
        "use the devices. To use the CPU instead, set JAX_PLATFORMS=cpu."
    )
