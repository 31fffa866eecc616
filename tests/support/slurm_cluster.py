"""A SLURM cluster of two virtual nodes on this machine, for one test module.

Its daemons are Debian's (slurm-wlm, munge); keys, state and logs lie in a
directory of the test's own. The nodes are named by loopback addresses, so that
their names resolve.
"""

import contextlib
import dataclasses
import getpass
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time

from keras_strategies.cluster.addresses import find_free_ports
from tests.support.commands import call

NODES = ("127.0.0.2", "127.0.0.3")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
LIMIT_S = 60
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={0} NodeHostname={1} NodeAddr={0} Port={2} CPUs=16"
GPUS = 4  # Pretended ones, of each node.


def missing():
    """The programs of SLURM that are not installed."""
    return [name for name in PROGRAMS if find(name) is None]


def find(name):
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Runs SLURM's commands in the cluster; its nodes may have GPUs."""

    environ: dict[str, str]
    has_gpus: bool

    def call(self, *words, limit_s=LIMIT_S, **options):
        """What a command prints."""
        command = find(words[0]), *words[1:]
        return call(*command, limit_s=limit_s, env=self.environ, **options)

    def job(self, number):
        """What scontrol says of a job, by its names."""
        text = self.call("scontrol", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, condition, limit_s):
        """Waits until `condition()` is true; whether that came to be."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.5)
        return False


@contextlib.contextmanager
def slurm_cluster(directory, **environ):
    """Starts the daemons in `directory`, and ends them."""
    directory = pathlib.Path(directory)
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(256))
    host = socket.gethostname().partition(".")[0]
    control, *ports = find_free_ports(1 + len(NODES))
    text = CONFIGURATION.format(
        host=host, control=control, user=getpass.getuser(), directory=directory
    )
    has_gpus = _pretend_gpus(directory)
    text += "GresTypes=gpu\n" * has_gpus
    for name, port in zip(NODES, ports, strict=True):
        text += NODE.format(name, host, port)
        text += f" Gres=gpu:{GPUS}" * has_gpus + "\n"
    configuration = directory / "slurm.conf"
    configuration.write_text(text)
    environ = os.environ | {"SLURM_CONF": str(configuration)} | environ
    cluster = Cluster(environ, has_gpus)
    files = [
        f"--{name}={directory}/munge.{end}"
        for name, end in (
            ("key-file", "key"),
            ("socket", "sock"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    with contextlib.ExitStack() as stack:

        def start(name, *words):
            log = stack.enter_context(open(directory / f"{name}.out", "ab"))
            process = subprocess.Popen(
                [find(name), *words], env=environ, stdout=log, stderr=log
            )
            stack.callback(_end, process)

        start("munged", "--foreground", "--force", *files)
        assert cluster.wait((directory / "munge.sock").exists, LIMIT_S)
        start("slurmctld", "-D", "-f", str(configuration))
        for name in NODES:
            start("slurmd", "-D", "-N", name, "-f", str(configuration))
        assert cluster.wait(lambda: _are_idle(cluster), LIMIT_S), [
            path.read_text() for path in directory.glob("*.out")
        ]
        yield cluster
        # Before the daemons go: nothing of a job is left behind.
        cluster.call("scancel", "--user", getpass.getuser())
        cluster.wait(lambda: not cluster.call("squeue", "-h"), LIMIT_S)


def _pretend_gpus(directory):
    """Makes the nodes' device files; whether this user may."""
    lines = []
    for name in NODES:
        (directory / name).mkdir()
        files = [directory / name / f"nvidia{index}" for index in range(GPUS)]
        for index, file in enumerate(files):
            try:
                # Numbers of NVIDIA's driver, which is not there.
                os.mknod(file, 0o20666, os.makedev(195, index))
            except PermissionError:
                return False
        names = f"{directory / name}/nvidia[0-{GPUS - 1}]"
        flags = "Name=gpu Flags=nvidia_gpu_env"
        lines.append(f"NodeName={name} {flags} File={names}\n")
    (directory / "gres.conf").write_text("".join(lines))
    return True


def _are_idle(cluster):
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        states = cluster.call("sinfo", "-h", "-N", "-o", "%t").split()
        return states == ["idle"] * len(NODES)
    return False


def _end(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
