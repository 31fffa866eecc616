"""What `keras-strategies doctor` finds, advises and shows."""

import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import re
import socket
import tomllib

import pytest
from rich.console import Console

import keras_strategies as ks
from keras_strategies.cli import main
from keras_strategies.cli.doctor import (
    clusters,
    doctor,
    findings,
    installed,
    run_probe,
)
from keras_strategies.cli.doctor.findings import Level, Part
from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.names import versions
from tests.support import strangers
from tests.support.combinations import combine
from tests.support.commands import python

ROOT = pathlib.Path(__file__).parents[3]
NOT_OF_CHILDREN = ("KERAS_", "JAX_", "XLA_", "TF_")


def run(*words, timeout=300, **environ):
    """Runs the command in a fresh process without this one's variables."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(NOT_OF_CHILDREN)
    }
    return python(
        "-m",
        "keras_strategies.cli",
        *words,
        env=inherited
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        | environ,
        timeout=timeout,
    )


def joined(text):
    """Text without the line breaks of a terminal."""
    return " ".join(text.split())


def wrong(part):
    """The texts of what is wrong in a part, with their fixes."""
    return [
        f"{finding.level.value}: {finding.text} {finding.fix}"
        for finding in part.findings
        if finding.level in (Level.PROBLEM, Level.WARNING)
    ]


def printed(report):
    """What a terminal shows of a report."""
    file = io.StringIO()
    doctor.print_report(report, Console(file=file, width=200))
    return file.getvalue()


def tf_config(addresses, index):
    return json.dumps(
        {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": index},
        }
    )


# One process.


@pytest.mark.multi_process
def test_report_of_one_process():
    done = run("doctor", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = joined(done.stdout)
    assert ks.__version__ in shown
    assert "2 x cpu" in shown
    assert re.search(r"all-reduce, 4 MiB [\d.]+ ms over 2 devices", shown)
    assert "An all-reduce over this machine's devices is correct." in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["launch", "--help"],
        ["doctor", "--help"],
        ["doctor", "--quick"],
        ["launch"],
        ["checkpoints", "--help"],
        ["checkpoints", "."],
        ["migrate", "--help"],
    ],
    ids=" ".join,
)
def test_neither_jax_nor_keras_is_imported(words):
    code = f"""
import sys
sys.argv = ["keras-strategies", *{words}]
from keras_strategies.cli import main
try:
    main()
except SystemExit:
    pass
slow = {{"jax", "jaxlib", "keras", "numpy", "tensorflow", "torch"}}
print("loaded:", sorted(slow & set(sys.modules)))
"""
    done = python(
        "-c", code, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_doctor_starts_whatever_is_wrong():
    environ = {"KERAS_BACKEND": "tensorflow", "KERAS_NNX_ENABLED": "true"}
    done = run("doctor", "--quick", **environ, TF_CONFIG='{"cluster": ')
    assert done.returncode == 1, done.stderr
    shown = joined(done.stdout)
    assert "KERAS_BACKEND is 'tensorflow'" in shown
    assert "KERAS_NNX_ENABLED is on" in shown
    assert "TF_CONFIG must be valid JSON" in shown
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"JAX_PLATFORMS": "cuda"},
            "was raised before JAX had started its devices",
        ),
        (
            {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_nonsense=3"},
            "Unknown flag in XLA_FLAGS: --xla_nonsense=3",
        ),
    ],
)
def test_what_jax_refuses_is_a_finding(environ, expected):
    done = run("doctor", **environ)
    assert done.returncode == 1, done.stderr
    shown = joined(done.stdout)
    assert expected in shown
    assert "If JAX_PLATFORMS or XLA_FLAGS is set, correct or unset it" in shown
    assert shown.endswith(": 1 problem")


def test_modules_of_the_current_directory_are_not_imported(
    tmp_path, monkeypatch
):
    imported = strangers.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    answers, _ = run_probe._probe(["jax"], None, 60.0, os.environ)
    assert answers["jax"]["version"]
    assert not imported.exists()


def test_environment_is_never_shown():
    secrets = {
        "AWS_SECRET": "hunter2",
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": ["127.0.0.1:4", "127.9.8.7:5"]},
                "task": {"type": "worker", "index": 0, "secret": "hunter2"},
                "password": "hunter2",
            }
        ),
    }
    report = doctor.examine(secrets, quick=True, timeout_s=1.0)
    shown = repr(report) + printed(report)
    assert "hunter2" not in shown
    assert "127.9.8.7" not in shown
    assert "127.0.0.1:4" in shown


# Packages and variables.


def test_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {line for line in project["dependencies"] if ">=" in line}
    assert {
        versions.make_requirement(name) for name in versions.MINIMUM
    } == asked


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"keras": "3.14.2"}, ["keras 3.14.2 is older than 3.15"]),
        (
            {"jax": "0.9.9", "keras": "3.20rc1"},
            ["keras 3.20rc1 is newer than", "jax 0.9.9 is older"],
        ),
        ({"keras": "3.16.0.dev2026102704"}, ["is newer than"]),
        ({"jax": "0.12.0.1"}, []),
        ({"jax": "0.13.0"}, ["jax 0.13.0 is newer than the tested"]),
        ({"jaxlib": None}, ["jaxlib is not installed"]),
        (
            {"orbax-checkpoint": "0.12.4", "rich": "16.0.0"},
            [
                "orbax-checkpoint 0.12.4 is older than 0.12.5,",
                "rich 16.0.0 is newer than the tested",
            ],
        ),
        ({"numpy": "1.26.4"}, ["numpy 1.26.4 is older than 2,"]),
    ],
)
def test_packages_of_other_versions_are_found(changed, expected):
    present = {"keras": "3.15.1", "jax": "0.10.2", "jaxlib": "0.10.2"}
    present |= {"numpy": "2.0.0", "orbax-checkpoint": "0.12.5"}
    present |= {"rich": "15.0.0"} | changed
    found = wrong(installed.check_packages(present.get))
    assert len(found) == len(expected)
    for text, part in zip(found, expected, strict=True):
        assert part in text
        is_newer = "is newer" in part
        assert text.startswith("warning" if is_newer else "problem")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}, []),
        ({"KERAS_BACKEND": "torch"}, ["problem: KERAS_BACKEND is 'torch'"]),
        ({"KERAS_NNX_ENABLED": "1"}, ["problem: KERAS_NNX_ENABLED is on"]),
        ({"KERAS_NNX_ENABLED": "false"}, []),
        (
            {"XLA_FLAGS": "--xla_dump_to='a"},
            ["problem: XLA_FLAGS must consist of flags"],
        ),
        (
            {"XLA_FLAGS": "/no/such/file"},
            ["problem: XLA_FLAGS must consist of flags"],
        ),
        ({"KERAS_STRATEGIES_TIMEOUT_S": "60"}, []),
        *(
            (
                {"KERAS_STRATEGIES_TIMEOUT_S": text},
                ["problem: The environment variable KERAS_STRATEGIES_TIMEOUT"],
            )
            for text in ("nan", "0", "-1", "soon", "")
        ),
    ],
)
def test_variables(environ, expected):
    found = wrong(installed.check_variables(environ))
    assert len(found) == len(expected)
    for text, beginning in zip(found, expected, strict=True):
        assert text.startswith(beginning)


# Clusters.

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "JAX_PROCESS_COUNT": "2",
    "JAX_COORDINATOR_ADDRESS": "train-0.train:8476",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "name", "setter", "address"),
    [
        (
            {"TF_CONFIG": tf_config(["a:1", "b:1"], 1)},
            "TF_CONFIG",
            "the program that",
            "a:1",
        ),
        (SLURM, "SLURM", "srun", "node1:8888"),
        (POD, "Kubernetes", "Kubernetes", "train-0.train:8476"),
        (TORCHRUN, "torchrun", "torchrun", "host0:29500"),
        (OPEN_MPI, "Open MPI", "mpirun", None),
        ({"TPU_WORKER_ID": "1"}, "Cloud TPU", "Cloud TPU", None),
    ],
)
def test_cluster_is_found(environ, name, setter, address):
    part, cluster = clusters.check_clusters(environ)
    assert cluster.name == name
    assert wrong(part) == []
    rows = dict(part.rows)
    assert rows["set by"].startswith(setter)
    assert set(rows["variables"].split(", ")) == set(environ)
    assert cluster.address == address
    if address is not None:
        assert rows["process"] == "1 of 2"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG must be valid JSON"),
        ({"TF_CONFIG": tf_config(["a:1", "b:1"], 2)}, "task 2 of job 'worker'"),
        ({"TF_CONFIG": tf_config(["a:1", "a:1"], 0)}, "'a:1' for task 0"),
        (
            {"TF_CONFIG": json.dumps({"clusters": {"worker": ["a:1", "b:1"]}})},
            "under the key \"cluster\". Received: the keys ['clusters']",
        ),
        *(
            (
                {"TF_CONFIG": tf_config(["localhost:1", "b:1"], index)},
                "problem: The variables of TF_CONFIG are not valid: All "
                "processes must be able to reach process 0",
            )
            for index in (0, 1)
        ),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID must be an integer"),
        (TORCHRUN | {"RANK": "7"}, "RANK must be an integer from 0 to 1"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JAX_PROCESS_COUNT not found"),
        (SLURM | TORCHRUN, "SLURM and torchrun are all set"),
        ({"SLURM_JOB_ID": "7"}, "Start the script with `srun`"),
    ],
)
def test_broken_clusters_are_found(environ, expected):
    part, _ = clusters.check_clusters(environ)
    assert len(wrong(part)) == 1
    assert expected in wrong(part)[0]


def test_process_without_a_cluster_is_alone():
    part, cluster = clusters.check_clusters({})
    assert cluster is None
    assert part.findings == ()
    part, cluster = clusters.check_clusters({"TF_CONFIG": "{}"})
    assert cluster.address is None


def place(process_id, address, num_processes=2):
    return TaskInfo(
        type="worker",
        index=process_id,
        is_chief=process_id == 0,
        process_id=process_id,
        num_processes=num_processes,
        addresses=(address, *["10.0.0.2:1"] * (num_processes - 1)),
    )


def found_at(process_id, address, environ=None):
    part = clusters.check_address(environ or {}, place(process_id, address))
    return [finding.level for finding in part.findings], " ".join(wrong(part))


def test_address_of_the_coordinator_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        levels, text = found_at(0, address)
        assert levels == [Level.PROBLEM]
        assert "already in use" in text
        assert address in text
        assert found_at(1, address)[0] == [Level.GOOD]
        elsewhere = {"JAX_COORDINATOR_BIND_ADDRESS": address}
        assert "already in use" in found_at(0, "h:1", elsewhere)[1]


def test_address_of_the_coordinator_that_nobody_listens_at():
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    assert "Connection refused" in found_at(1, address)[1]
    # Others are on other machines, and 127.0.0.1 is each machine's own.
    levels, text = found_at(0, address)
    assert levels == [Level.GOOD, Level.PROBLEM]
    assert "processes on other machines cannot reach" in text


@pytest.mark.parametrize(
    ("process_id", "address", "expected"),
    [
        (1, "no-such-host.invalid:2", "no-such-host.invalid:2"),
        (0, "no-such-host.invalid:2", "no-such-host.invalid:2"),
        # Reserved for documents: nobody's.
        (0, "203.0.113.1:2222", "cannot listen at 203.0.113.1:2222"),
    ],
)
def test_address_of_the_coordinator_that_is_wrong(
    process_id, address, expected
):
    levels, text = found_at(process_id, address)
    assert levels == [Level.PROBLEM]
    assert expected in text


def test_coordinator_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(clusters, "_CONNECT_S", 0.2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        # More than it lets wait: as behind a firewall, nothing comes back.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        levels, text = found_at(1, f"127.0.0.1:{server.getsockname()[1]}")
    assert levels == [Level.PROBLEM]
    assert "timed out" in text
    assert "firewall" in text


# Several processes.


def test_an_address_at_which_all_have_met_is_no_problem(monkeypatch):
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    environ = {"TF_CONFIG": tf_config([address, "127.0.0.2:1"], 0)}
    expected = "processes on other machines cannot reach"
    monkeypatch.setattr(doctor, "_check_jax", lambda *_: [Part(title="Job")])
    report = doctor.examine(environ, quick=False, timeout_s=1.0)
    assert expected not in " ".join(f.text for f in report.problems)
    report = doctor.examine(environ, quick=True, timeout_s=1.0)
    assert expected in " ".join(f.text for f in report.problems)


def test_a_secret_is_looked_at_and_not_shown():
    for text, level in (("too small", [Level.PROBLEM]), ("x" * 40, [])):
        environ = {"KERAS_STRATEGIES_SECRET": text}
        part = installed.check_variables(environ)
        assert [finding.level for finding in part.findings] == level
        assert dict(part.rows)["KERAS_STRATEGIES_SECRET"].startswith("set")
        assert text not in repr(part)


@pytest.mark.multi_process
def test_processes_meet_join_and_time_an_all_reduce():
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    environ = os.environ | {"XLA_FLAGS": ""}

    def check(process_id):
        text = tf_config(addresses, process_id)
        (cluster,) = clusters.find_clusters({"TF_CONFIG": text})
        return run_probe.check_jax("Job", cluster, environ, 200.0)[0]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = list(pool.map(check, range(2)))
    for part in parts:
        assert [finding.level for finding in part.findings] == [Level.GOOD] * 2
        rows = dict(part.rows)
        assert rows["processes"] == "2"
        assert rows["devices"] == "2 x cpu"
        assert rows["all-reduce, 4 MiB"].endswith("ms over 2 devices")


@pytest.mark.slow
def test_report_of_a_job_is_the_chiefs():
    done = run(
        "launch", "--processes", "2", "-m", "keras_strategies.cli", "doctor"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chief = [x for x in done.stdout.splitlines() if not x.startswith("[")]
    shown = joined(" ".join(chief))
    assert "process 0 of 2" in shown
    assert "All processes have connected" in shown
    assert re.search(r"all-reduce, 4 MiB [\d.]+ ms over 2 devices", shown)
    assert "An all-reduce over all processes is correct." in shown
    others = [x for x in done.stdout.splitlines() if x.startswith("[worker 1]")]
    assert others == ["[worker 1] process 1 of 2: nothing to change"]


@pytest.mark.parametrize("process_id", combine([0, 1], every=2))
def test_process_that_does_not_come_is_named(process_id):
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    cluster = clusters.find_clusters(
        {"TF_CONFIG": tf_config(addresses, process_id)}
    )[0]
    environ = os.environ | {"XLA_FLAGS": ""}
    part, _ = run_probe.check_jax("Job", cluster, environ, 0.5)
    text = " ".join(wrong(part))
    expected = "(worker 1, " if process_id == 0 else addresses[0]
    assert expected in text
    assert "Run doctor in all processes" in text


@pytest.mark.parametrize(
    ("told", "end", "expected"),
    [
        ({"jax": {}}, (None, ""), "time limit ended before JAX"),
        ({"devices": {}}, (-6, "Check failed"), "ended by SIGABRT before"),
        ({"devices": {}}, (-6, "Check failed"), "last output: Check failed"),
        (
            {"devices": {"error": "E: no"}},
            (1, ""),
            "started its devices: E: no. set JAX_PLATFORMS=cpu",
        ),
        ({"all_reduce": {}}, (-6, ""), "reach each other on all ports"),
        ({"keras": {"error": "E: no"}}, (1, ""), "Reinstall the packages"),
    ],
)
def test_end_of_the_probe_is_explained(told, end, expected):
    (found,) = run_probe._check_end(told, end)
    assert found.level is Level.PROBLEM
    for part in expected.split(". "):
        assert part in f"{found.text} {found.fix}"


def test_wrong_sums_are_problems(monkeypatch):
    answers = {"all_reduce": {"is_right": False}}
    monkeypatch.setattr(run_probe, "_probe", lambda *_: (answers, (0, "")))
    part, has_devices = run_probe.check_jax("Devices", None, {}, 1.0)
    (found,) = part.findings
    assert "wrong sum" in found.text
    assert not has_devices


# The report.


def test_worst_is_reported_first():
    report = findings.Report(
        name="host",
        parts=(
            findings.Part(
                title="A",
                findings=(
                    findings.good("g"),
                    findings.warning("w", "x"),
                    findings.warning("v", "x"),
                    findings.problem("f", "x"),
                ),
            ),
        ),
    )
    assert [finding.text for finding in report.problems] == list("fwv")
    assert report.summary == "1 problem, 2 warnings"


ORDERS = "\x1b[31m\x07\x9b2J\u202e\x08\udcff"


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"XLA_FLAGS": f"--xla_a={ORDERS}"}, "--xla_a=\\x1b[31m"),
        ({"JAX_PLATFORMS": ORDERS}, "\\x1b[31m"),
        ({"KERAS_BACKEND": ORDERS}, "\\x1b[31m"),
        (TORCHRUN | {"MASTER_ADDR": f"a{ORDERS}"}, ""),
        (TORCHRUN | {"RANK": ORDERS}, ""),
        (SLURM | {"SLURM_STEP_NODELIST": f"n{ORDERS}[1-2]"}, ""),
        (POD | {"JAX_COORDINATOR_ADDRESS": f"a{ORDERS}:1"}, ""),
        (
            {
                "TF_CONFIG": tf_config(["127.0.0.1:1", "127.0.0.2:1"], 0),
                "JAX_COORDINATOR_BIND_ADDRESS": f"a{ORDERS}:1",
            },
            "",
        ),
        ({"TF_CONFIG": tf_config([f"a{ORDERS}:1", "b:1"], 0)}, ""),
        ({"TF_CONFIG": ORDERS}, ""),
    ],
)
def test_a_terminal_gets_no_orders_from_the_environment(environ, shown):
    report = doctor.examine(environ, quick=True, timeout_s=1)
    text = printed(report)
    assert shown in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    text.encode()


def test_a_terminal_gets_no_orders_from_a_child():
    found = findings.problem(f"Its last line: {ORDERS}", ORDERS)
    part = findings.Part(title="Devices", findings=(found,))
    text = printed(findings.Report(name="host", parts=(part,)))
    assert text.replace("\n", "").isprintable()


# The command.


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert ks.__version__ in capsys.readouterr().out


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fix"])
    assert "fix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["launch", "--workers", "2", "train.py"], ("launch [OPTIONS]",)),
        (["doctor", "--fast"], ("doctor [-h] [--quick]", "--fast")),
        (
            ["plan", "a.py", "--topology", "v5e:2x2", "--fast"],
            ("plan (SCRIPT | -m MODULE)", "--fast"),
        ),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(words, parts, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert "unrecognized arguments: --" in error
    for part in parts:
        assert part in error


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
