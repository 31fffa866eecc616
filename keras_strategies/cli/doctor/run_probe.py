"""Runs `probe` in child processes and derives findings from its answers."""

import dataclasses
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_strategies.cli.doctor.clusters import Cluster, check_address
from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    fault,
    good,
    note,
)
from keras_strategies.cli.doctor.installed import DEVICE_COUNT
from keras_strategies.cli.launch.local_job import describe_exit
from keras_strategies.cluster.child_program import make_command_line
from keras_strategies.cluster.exchange.message_forms import fault_of
from keras_strategies.cluster.exchange.rendezvous import RendezvousError
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.gpu.xla_flags import is_deterministic
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_PROBE = "keras_strategies.cli.doctor.probe"
# The time limit for JAX to start its devices, which takes long on large slices.
_DEVICES_S = 90.0
_LAST_LINES = 3
_CURE_OF_FLAGS = (
    "XLA aborts the process if XLA_FLAGS contains an unknown flag. Remove or "
    "correct this flag. Flags for TPUs belong in LIBTPU_INIT_ARGS."
)
_LONGEST = 600
_MAX_LINE = 1 << 20
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
"""The answers that `probe` has written, by the name of the stage."""


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
    answers, end = _probe(
        ["jax", "devices", "all_reduce", "keras"], None, _DEVICES_S, environ
    )
    devices = answers.get("devices", {})
    rows, findings = [], []
    if "kinds" in devices:
        rows.append(("devices", _format_kinds(devices["kinds"])))
        rows += _make_all_reduce_rows(answers.get("all_reduce", {}))
        rows += make_determinism_rows(devices["kinds"], environ)
        findings += [_check_kinds(devices["kinds"])] if is_alone else []
    for stage, name in _TIMED.items():
        if "seconds" in answers.get(stage, {}):
            rows.append((name, f"{answers[stage]['seconds']:.1f} s"))
    findings += _check_all_reduce(answers, "this machine's devices")
    findings += _check_end(answers, end, environ)
    part = Part(title="Devices", rows=tuple(rows), findings=tuple(findings))
    return part, "kinds" in devices


_MET = good("All processes have connected, and JAX has started the job.")


def has_met(part: Part) -> bool:
    """Returns whether `check_job` reported that all processes connected."""
    return _MET in part.findings


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
        findings.append(_MET)
    devices = answers.get("devices", {})
    if "kinds" in devices:
        hosts = devices["hosts"]
        rows.append(("processes", str(len(hosts))))
        rows.append(("machines", str(len(set(hosts)))))
        rows.append(("devices", _format_kinds(devices["kinds"])))
        rows += make_determinism_rows(devices["kinds"], environ)
        findings += _check_counts(devices["by_process"])
    rows += _make_all_reduce_rows(answers.get("all_reduce", {}))
    findings += _check_all_reduce(answers, "all processes")
    findings += _check_meeting(answers, cluster, environ)
    findings += _check_end(answers, end, environ)
    return Part(title="Job", rows=tuple(rows), findings=tuple(findings))


def make_determinism_rows(
    kinds: Sequence[Sequence[Any]], environ: Mapping[str, str]
) -> list[Row]:
    """Makes a row that says whether GPUs compute the same bits in every run.

    Args:
      kinds: The platform, kind and number of devices of each kind.
      environ: The environment variables.
    """
    if all(platform != "gpu" for platform, *_ in kinds):
        return []
    if is_deterministic(environ):
        return [("determinism", "on: runs are equal bit for bit")]
    text = "off: runs differ by rounding (`ks.enable_determinism()`)"
    return [("determinism", text)]


def _probe(
    stages: Sequence[str],
    join: dict[str, Any] | None,
    timeout_s: float,
    environ: Mapping[str, str],
) -> tuple[Answers, tuple[int | None, str]]:
    """Runs stages of `probe` in a child process.

    Returns:
      A tuple of the answers of the stages and the result of `_run_child`.
    """
    question = {"stages": stages, "join": join, "timeout_s": timeout_s}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "answers"
        words = make_command_line(_PROBE, str(path), json.dumps(question))
        code, text = _run_child(words, timeout_s + _DEVICES_S, environ)
        answers = _parse_answers(path.read_bytes() if path.exists() else b"")
    return answers, (code, text)


def _parse_answers(text: bytes) -> Answers:
    """Parses the JSON lines of `probe`'s answers; skips incomplete lines."""
    answers: Answers = {}
    for line in text.splitlines():
        try:
            answer = load_json(line, max_characters=_MAX_LINE)
        except ValueError:
            continue
        if fault_of(answer, {"stage": str}) is None:
            answers.setdefault(answer.pop("stage"), {}).update(answer)
    return answers


def _run_child(
    words: Sequence[str], timeout_s: float, environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """Runs a command and waits for it to end.

    Returns:
      A tuple of the exit status (None if the command timed out) and the last
      lines that it wrote to stderr.
    """
    added = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "1"}
    dropped = (LAUNCHER_FD, "KERAS_NNX_ENABLED")
    inherited = {k: v for k, v in environ.items() if k not in dropped}
    try:
        ended = subprocess.run(
            words,
            env=inherited | added,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
        )
        code, output = ended.returncode, ended.stderr
    except subprocess.TimeoutExpired as late:
        code, output = None, late.stderr or b""
    text = output.decode(errors="replace")
    last = [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return code, "\n".join(last)[:_LONGEST]


def _format_kinds(kinds: Sequence[Sequence[Any]]) -> str:
    return "\n".join(
        f"{count} x {name}" + (f" ({kind})" if kind != name else "")
        for name, kind, count in kinds
    )


def _make_all_reduce_rows(answers: dict[str, Any]) -> Iterator[Row]:
    if "large" not in answers or answers["devices"] < 2:
        return
    for name in ("small", "large"):
        size, ms = answers[name]["bytes"], answers[name]["ms"]
        shown = f"{size >> 20} MiB" if size >> 20 else f"{size} bytes"
        took = f"{ms:.2f} ms over {answers['devices']} devices"
        yield f"all-reduce, {shown}", took


def _check_kinds(kinds: Sequence[Sequence[Any]]) -> Finding:
    (name, _, count), *_ = kinds
    if count > 1 or len(kinds) > 1:
        return good(f"JAX has {sum(kind[2] for kind in kinds)} devices.")
    if name != "cpu":
        return note("JAX has one device, so a strategy has one replica.")
    return note(
        "JAX has one CPU device, so a strategy has one replica.",
        f"To try several replicas, set XLA_FLAGS={DEVICE_COUNT}4.",
    )


def _check_counts(counts: list[int]) -> Iterator[Finding]:
    if len(set(counts)) > 1:
        yield fault(
            "The processes have different numbers of devices: "
            f"{', '.join(map(str, counts))}.",
            "Use the same number of devices in all processes, because a "
            "strategy divides batches evenly.",
        )


def _check_all_reduce(answers: Answers, over: str) -> Iterator[Finding]:
    answer = answers.get("all_reduce", {})
    if "large" not in answer or answer["devices"] < 2:
        return
    if answer["small"]["is_right"] and answer["large"]["is_right"]:
        yield good(f"An all-reduce over {over} is correct.")
    else:
        yield fault(
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
    yield fault(
        "The processes cannot start a job together. "
        f"{answers['join']['error']}",
        "Run doctor in all processes at the same time, for example with `srun "
        "keras-strategies doctor`, with `torchrun -m keras_strategies.cli "
        "doctor` or in all pods. To check only this process, run `doctor "
        "--quick`.",
    )
    for finding in check_address(cluster.info, environ, connects=True):
        if finding.fix and cluster.info.process_id:
            yield finding


def _check_end(
    answers: Answers, end: tuple[int | None, str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields a finding about the last stage if that stage failed."""
    code, text = end
    if code == 0 or _failed_to_meet(answers):
        return
    stage = list(answers)[-1] if answers else "jax"
    error = answers.get(stage, {}).get("error")
    flags = environ.get("XLA_FLAGS")
    if code is None:
        what = f"The time limit ended before {_NAMES[stage]}."
    elif error is None:
        what = f"The process {describe_exit(code)} before {_NAMES[stage]}."
        if code < 0:
            # XLA aborts its own process. "Killed" would suggest that another
            # process did it.
            what = what.replace("was killed by", "was ended by")
    else:
        kind = answers[stage].get("kind", "an error")
        what = f"{kind} was raised before {_NAMES[stage]}: {error}"
    if error is None and text:
        what += f" Its last output: {text}"
    if code and error is None and stage == "devices" and flags:
        yield fault(what, _CURE_OF_FLAGS)
    else:
        yield fault(what, _choose_cure(stage, environ.get("JAX_PLATFORMS")))


def _choose_cure(stage: str, platforms: str | None) -> str:
    if stage == "keras":
        return "Reinstall the packages that this report lists as faults."
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
