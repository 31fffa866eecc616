"""Every parser of texts that come from outside, with valid ones and errors."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console

from keras_strategies import cluster_resolver
from keras_strategies.checkpoint import nests
from keras_strategies.checkpoint.contents import load_document
from keras_strategies.checkpoint.directory import lock
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.manifest import read_manifest
from keras_strategies.checkpoint.directory.verify import guard_restore
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cli.checkpoints.checkpoint_list import look_at
from keras_strategies.cli.checkpoints.checkpoints import print_listing
from keras_strategies.cli.doctor import run_probe
from keras_strategies.cluster.addresses import check_address
from keras_strategies.cluster.checks import TIMEOUT, read_timeout
from keras_strategies.cluster.exchange import (
    greetings,
    job_secret,
    joining,
)
from keras_strategies.cluster.exchange.exit_codes import Cause
from keras_strategies.cluster.exchange.message_forms import (
    Either,
    Form,
    read_messages,
)
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.cluster.resolvers import slurm_step
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    parse_tf_config,
)
from keras_strategies.cluster.tasks import task_info
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.data import batch_spec
from keras_strategies.data.shuffled_orders import BatchOrder, RowOrder
from keras_strategies.data.source import Part
from keras_strategies.data.step_checks import raise_everywhere
from keras_strategies.data.steps import Steps
from keras_strategies.estimator import exporting, records, train_callback
from keras_strategies.estimator.config.run_cluster import parse_cluster
from keras_strategies.fit.callbacks import callback_states, fit_state
from keras_strategies.fit.inputs import agree_source
from keras_strategies.job.local_gpus import (
    VISIBLE,
    count_visible_gpus,
    parse_gpus,
)
from keras_strategies.job.place import find_unjoined_job
from keras_strategies.planning.compile.layouts import parse_layout
from keras_strategies.tpu.topology import Topology
from keras_strategies.watchdog.failure_detector import Heartbeat
from keras_strategies.watchdog.heartbeat_thread import (
    _parse_heartbeats,
    _parse_processes,
)
from tests.support.checkpoint.written import write_small
from tests.support.workers import Mesh

Parse = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Parser:
    """A parser.

    Attributes:
      documents: Texts that it takes.
      prepared: Makes, from a directory, what parses a text; what it does itself
        is not watched.
      errors: The classes of errors that it says it raises.
      is_text: Whether it is given str; bytes otherwise.
      puts: The file of the directory that holds the text, if one does.
    """

    documents: Sequence[str]
    prepared: Callable[[Any], Parse]
    _: dataclasses.KW_ONLY
    errors: tuple[type[Exception], ...] = ()
    is_text: bool = True
    puts: str | None = None


def of(parse: Parse) -> Callable[[Any], Parse]:
    return lambda directory: parse


_ROWS = np.ones((2, 3), "float32")
STRUCTURES = [
    batch_spec.make_spec({"a": (_ROWS, [np.ones(2, "int32")]), "b": _ROWS}),
    batch_spec.make_spec((_ROWS, None)),
    batch_spec.make_spec((_ROWS, {1: np.ones(2, "U5")})),
]
NONCE = job_secret.make()
HELLOS = [
    json.dumps(
        {
            "job": greetings.HELLO,
            "process": 1,
            "count": 2,
            "facts": {"strategy": "A"},
            "problem": "",
            "nonce": NONCE,
        }
    )
]
TF_CONFIGS = [
    json.dumps(
        {
            "cluster": {
                "chief": ["a:1"],
                "worker": {"0": "b:2", "1": "[::1]:3"},
            },
            "task": {"type": "worker", "index": 0},
            "rpc_layer": "grpc",
            "model_dir": "x",
            "service": {"a": 1},
            "session_master": "",
            "eval_session_master": "",
        }
    ),
    '{"cluster": {}, "task": {"type": "worker", "index": "0"}}',
]
VARIABLES = {"weights": {"dense.kernel": [[2, 3], "float32"]}, "x": {}}
NEST, _ARRAYS = nests.split(
    {"a": (1, [np.float32(2)], _ROWS), "b": np.ones((0, 2)), "c": {"__x__": 1}}
)
POSITION = {"epoch": 1, "step": 2, "seed": None}
FIT_STATE = {
    "epoch": 1,
    "step": 2,
    "num_steps": 12,
    "is_stopped": False,
    "logs": {"loss": 1.0},
    "sizes": {"batches": 4},
    "feed": {"position": POSITION},
    "validation": {"positions": [POSITION, POSITION]},
    "callbacks": {"CSVLogger": {"size": 3, "keys": ["loss"]}},
}
FACTS = {"logs": {"loss": 0.5, "x": "NaN"}, "epoch": 3, "started": 1.7e9}


def _task(text: str) -> object:
    parse_tf_config(text)
    environ = {"TF_CONFIG": text}
    return task_info(cluster_resolver.TFConfigClusterResolver(environ=environ))


def _compute_answer(text: str) -> object:
    """Of process 0, as the others hear it; with a secret and without."""
    for secret in (None, job_secret.Secret("s" * 32)):
        guest = joining._Guest(_Line(text), secret)  # pyright: ignore[reportArgumentType]
        hello = {"process": 1, "count": 2, "facts": {}, "problem": ""}
        with contextlib.suppress(ConnectionError):
            guest.ask(hello, 0.0)
    return None


class _Line:
    """A connection on which this comes, and then the end."""

    def __init__(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass") + b"\n"
        self._left = [data[i : i + 65_536] for i in range(0, len(data), 65_536)]

    def sendall(self, data: bytes) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        pass

    def recv(self, size: int) -> bytes:
        return self._left.pop(0) if self._left else b""


def _variables(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, _, value in lines}


def _resolver(kind: Callable[..., Any]) -> Parse:
    return lambda text: task_info(kind(environ=_variables(text)))


def _manifest(directory: Any) -> Parse:
    path = directory / "7"
    return lambda text: read_manifest(path)


def manifest_texts(directory: Any) -> list[str]:
    path = write_small(directory, 7, FACTS, VARIABLES, created=1.7e9)
    return [(path / "manifest.json").read_text()]


def _signed(text: bytes) -> bytes:
    """The text as a manifest whose checksum is right, if it can be one."""
    try:
        content = load_json(text, max_characters=1 << 26)
        content.pop("checksum", None)
        dump = lambda: json.dumps(content, sort_keys=True, indent=1)  # noqa: E731
        content["checksum"] = hashlib.sha256(dump().encode()).hexdigest()
        return dump().encode() + b"\n"
    except (ValueError, AttributeError, TypeError):  # No object.
        return text


def _listed(directory: Any) -> Parse:
    # What it imports for the first of them.
    Console().render_str(":x:")
    cell_len("\u4e00")

    def parse(text: bytes) -> object:
        listing = look_at(str(directory), is_quick=True)
        console = Console(width=80, file=io.StringIO())
        return print_listing(listing, console)

    return parse


def _document(directory: Any) -> Parse:
    def parse(text: bytes) -> object:
        try:
            return load_document(directory / "7")
        except ValueError as error:
            if "this version reads format" in str(error):
                return None
            raise

    return parse


ORBAX_TREE = (
    """{"tree_metadata": {"('m', 'a')": {"key_metadata": [{"key": "m", """
    """"key_type": 2}, {"key": "a", "key_type": 2}], "value_metadata": """
    """{"value_type": "jax.Array", "skip_deserialize": false}}}, """
    """"use_ocdbt": true, "use_zarr3": false, "custom_metadata": null}"""
)


def _restoring(name: str) -> Callable[[Any], Parse]:
    """What is looked at before Orbax reads a checkpoint."""

    def prepared(directory: Any) -> Parse:
        tree = directory / "7/state/_METADATA"
        (directory / "7" / name).parent.mkdir(parents=True)
        tree.write_text(ORBAX_TREE)

        def parse(text: bytes) -> object:
            with guard_restore(directory / "7", {"m": ["a"]}):
                return None

        return parse

    return prepared


def _writer(directory: Any) -> Parse:
    def parse(text: bytes) -> object:
        descriptor = os.open(directory / ".lock", os.O_RDONLY)
        try:
            return str(lock._read_writer(descriptor))
        finally:
            os.close(descriptor)

    return parse


class _Source:
    """Of rows that are each process's own."""

    kind, is_process_local, batch_size, likely_size = "data", True, 4, None
    checksum, is_planned = None, False

    def read(self, epoch: int, start: int, cut: Any) -> Any:
        return iter([Part(data=_ROWS, rows=2)])


class _Talk:
    """An agreement in which another process says something else."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def exchange(self, text: str, is_stopped: Any = None) -> list[str]:
        is_last = len(self._texts) == 1
        said = self._texts[0] if is_last else self._texts.pop(0)
        return [text, said]

    def end(self) -> None:
        pass


_END = '{"rows": null, "checksum": null, "place": "step 0 of epoch 0"}'
_MESH: Any = Mesh(num_processes=2, replicas_per_process=2)


def _heard_by_steps(size: int | None) -> Parse:
    source: Any = _Source()
    source.batch_size = size

    def parse(text: str) -> object:
        # A process without rows in any step would be waited for for ever.
        texts = [text] * (9 if size else 1) + [_END]
        steps = Steps(
            source=source,
            mesh=_MESH,
            name="fit",
            agree=lambda processes, name: _Talk(*texts),
        )
        return list(itertools.islice(steps.read_epoch(0), 3))

    return parse


def _heard_by_makers(text: str) -> object:
    rounds = Rounds((0, 1), "fit", agree=lambda processes, name: _Talk(text))
    for form in (agree_source._MADE, agree_source._SHAPES):
        with contextlib.suppress(RuntimeError):
            heard = rounds.exchange({}, form)
            raise_everywhere(_MESH, "It", heard[1:] * 2, None)
    form = {"number": int}
    return rounds.exchange({"number": 1}, form)


def _heard_by_storage(directory: Any) -> Parse:
    storage = Storage(directory, processes=(0, 1), keep=None)  # pyright: ignore[reportArgumentType]
    storage.is_chief = False

    def parse(text: str) -> object:
        rounds = Rounds((0, 1), "opening", agree=lambda *_: _Talk(text))

        def exchange(doing: str, message: object, form: Form) -> list[Any]:
            return rounds.exchange(message, form)[::-1]

        storage._exchange = exchange
        return storage._run_on_chief("opening", lambda: None, int | None)

    return parse


def _fit_state(text: str) -> object:
    state = nests.join(load_json(text, max_characters=1 << 26), {})
    loop: Any = object.__new__(fit_state.FitState)
    loop.feed = loop._validation = None
    loop._epochs, loop.mesh = 3, _MESH
    return fit_state.FitState.resume(loop, state)


def _object_states(text: str) -> object:
    state = nests.join(load_json(text, max_characters=1 << 26), {})
    return nests.select_local_states(state, (0, 1), "a checkpoint")


def _seed(order: Any) -> Parse:
    def parse(text: str) -> object:
        order.restart(text)
        return order.compute(0)

    return parse


_ROW_SEED, _BATCH_SEED = RowOrder(9).seed, BatchOrder(9).seed
_SLURM = """SLURM_PROCID=1
SLURM_STEP_NUM_TASKS=4
SLURM_STEP_NODELIST=n[1-2],m[03-04]x
SLURM_STEP_TASKS_PER_NODE=1(x4)
CUDA_VISIBLE_DEVICES=0,1
SLURM_STEP_GPUS=0"""
_TORCHRUN = """RANK=1
WORLD_SIZE=2
LOCAL_RANK=1
MASTER_ADDR=host
MASTER_PORT=2222
TORCHELASTIC_USE_AGENT_STORE=True"""
_POD = """JOB_COMPLETION_INDEX=1
JAX_PROCESS_COUNT=2
JAX_COORDINATOR_ADDRESS=job-0.svc:1234
JAX_COORDINATOR_PORT=1234"""
_TPU = """TPU_WORKER_ID=1
TPU_WORKER_HOSTNAMES=a,b
TPU_NAME=x
MEGASCALE_NUM_SLICES=2
MEGASCALE_SLICE_ID=0
JAX_COORDINATOR_PORT=8476"""
_NO_ENVIRON = (RuntimeError, ValueError)

PARSERS: dict[str, Parser] = {
    "JSON": Parser(
        ['{"a": [1, 2.5, null, "x", {"b": true}]}'],
        of(lambda data: load_json(data, max_characters=1 << 20)),
        errors=(ValueError,),
        is_text=False,
    ),
    "structure": Parser(
        STRUCTURES, of(batch_spec.make_empty), errors=(ValueError,)
    ),
    "rendezvous: hello": Parser(
        HELLOS, of(greetings.parse_hello), is_text=False
    ),
    "rendezvous: answer": Parser(
        [
            *HELLOS,
            '{"job": "keras_strategies", "left_s": 5}',
            '{"job": "keras_strategies", "verdict": "x"}',
            json.dumps(
                {"job": greetings.HELLO, "nonce": NONCE, "proof": NONCE}
            ),
        ],
        of(_compute_answer),
    ),
    "rendezvous: text": Parser(
        ["A text.\n"],
        of(greetings.clean_text),
    ),
    "job secret": Parser(
        ["x" * 20, "\u00e9" * 20],
        of(lambda text: job_secret.read_secret({job_secret.VARIABLE: text})),
        errors=(ValueError,),
    ),
    "TF_CONFIG": Parser(TF_CONFIGS, of(_task), errors=(ValueError, TypeError)),
    "TF_CONFIG of an estimator": Parser(
        TF_CONFIGS,
        of(lambda text: parse_cluster(text, needs_chief=False)),
        errors=(ValueError, TypeError),
    ),
    "features.json": Parser(
        STRUCTURES[::2],
        lambda directory: lambda _: exporting.read_features(str(directory)),
        is_text=False,
        puts=exporting.FEATURES,
    ),
    "evaluations.jsonl": Parser(
        [
            '{"global_step": 3, "metrics": {"loss": 0.5, "auc": NaN}}',
            '{"global_step": 3, "metrics": {"loss": 1}}\n'
            '{"global_step": 4, "metrics": {}}\n',
        ],
        lambda directory: lambda _: records.read(str(directory)),
        is_text=False,
        puts=records.FILE,
    ),
    "training.json": Parser(
        ['{"ended_at_step": 12}'],
        lambda directory: (
            lambda _: train_callback.read_end_step(str(directory))
        ),
        is_text=False,
        puts=train_callback.MARK,
    ),
    "layouts of a plan": Parser(
        ["sharded:16+model:4", "slots:8", "replicated"],
        of(parse_layout),
        errors=(ValueError,),
    ),
    "manifest": Parser(
        [],
        _manifest,
        errors=(DamagedCheckpoint,),
        is_text=False,
        puts="7/manifest.json",
    ),
    "manifest with its checksum": Parser(
        [],
        _manifest,
        errors=(DamagedCheckpoint,),
        is_text=False,
        puts="7/manifest.json",
    ),
    "checkpoints listed": Parser(
        [], _listed, is_text=False, puts="7/manifest.json"
    ),
    "document": Parser(
        [json.dumps({"version": 1, "variables": VARIABLES, "state": NEST})],
        _document,
        errors=(DamagedCheckpoint,),
        is_text=False,
        puts="7/run/metadata",
    ),
    "Orbax's tree": Parser(
        [ORBAX_TREE],
        _restoring("state/_METADATA"),
        errors=(DamagedCheckpoint,),
        is_text=False,
        puts="7/state/_METADATA",
    ),
    "Orbax's arrays": Parser(
        [
            '{"array_metadatas": [{"array_metadata": {"param_name": "m.a", '
            '"write_shape": [4], "chunk_shape": [4], "ext_metadata": null}}]}'
        ],
        _restoring("state/array_metadatas/process_0"),
        errors=(DamagedCheckpoint,),
        is_text=False,
        puts="7/state/array_metadatas/process_0",
    ),
    "lock": Parser(
        ['{"host": "a", "pid": 3, "since": 1.7e9}'],
        _writer,
        is_text=False,
        puts=".lock",
    ),
    "state of a fit": Parser(
        [json.dumps(FIT_STATE)], of(_fit_state), errors=(ValueError,)
    ),
    "states of callbacks": Parser(
        ['{"size": 3, "keys": ["a"]}'],
        lambda directory: _csv_state(directory),
        errors=(ValueError,),
    ),
    "states of objects": Parser(
        ['{"all": {"x": {}}}', '{"each": [{}, {"x": 1}]}'],
        of(_object_states),
        errors=(ValueError,),
    ),
    "nest": Parser(
        [json.dumps(NEST)],
        of(
            lambda text: nests.join(
                load_json(text, max_characters=1 << 26), _ARRAYS
            )
        ),
        errors=(ValueError,),
    ),
    "nest of a process": Parser(
        [nests.pack({"a": _ROWS, "b": (np.float32(1), [None])})],
        of(nests.unpack),
        errors=(ValueError,),
    ),
    "seed of rows": Parser(
        [_ROW_SEED], of(_seed(RowOrder(9))), errors=(ValueError,)
    ),
    "seed of batches": Parser(
        [_BATCH_SEED], of(_seed(BatchOrder(9))), errors=(ValueError,)
    ),
    "topology": Parser(
        [
            Topology(
                mesh_shape=[2, 1, 1, 1],
                device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 0]]],
            )
            .serialized()
            .decode()
        ],
        of(Topology),
        errors=(ValueError,),
        is_text=False,
    ),
    "beat": Parser(
        [Heartbeat(number=2, where="x").to_json(), "[1, 2]"],
        of(
            lambda text: (
                Heartbeat.from_json(text),
                _parse_heartbeats([("a/1", text), (text, text)]),
                _parse_processes(text),
            )
        ),
    ),
    "cause": Parser([Cause(text="x").to_json()], of(Cause.from_json)),
    "a process's message": Parser(
        ['["fit", "{}"]', '["a", "b"]', '{"error": "x", "rows": 3}'],
        of(
            lambda text: read_messages(
                [text],
                Either(((str, str), {"rows": int, "error?": str})),
                processes=[0],
                about="it",
            )
        ),
        errors=(RuntimeError,),
    ),
    "message: steps": Parser(
        [
            json.dumps(
                {
                    "rows": 2,
                    "spec": batch_spec.make_spec(_ROWS),
                    "checksum": None,
                    "counts": None,
                    "place": "step 0 of epoch 0",
                }
            ),
            _END,
        ],
        of(_heard_by_steps(4)),
        errors=(RuntimeError, ValueError, TypeError),
    ),
    "message: first batches": Parser(
        ['{"rows": [2, 2], "is_cut": true}'],
        of(_heard_by_steps(None)),
        errors=(RuntimeError,),
    ),
    "message: data": Parser(
        ['{"number": 3, "facts": {}, "seed": 1, "outlines": ["x"]}'],
        of(_heard_by_makers),
        errors=(RuntimeError,),
    ),
    "message: checkpoints": Parser(
        ['["", false, 3]', '["x", true, null]'],
        _heard_by_storage,
        errors=(RuntimeError, DamagedCheckpoint),
    ),
    "SLURM": Parser(
        [_SLURM],
        of(_resolver(cluster_resolver.SlurmClusterResolver)),
        errors=_NO_ENVIRON,
    ),
    "SLURM's hosts": Parser(
        ["n[1-2],m5,o[3-4,06]", "r[1-2]n[1-2]", "n[1-99999]"],
        of(slurm_step.expand_hostlist),
        errors=(ValueError,),
    ),
    "SLURM's tasks": Parser(
        ["3(x2),2,1", "1(x99999)"],
        of(slurm_step.expand_tasks_per_node),
        errors=(ValueError,),
    ),
    "torchrun": Parser(
        [_TORCHRUN],
        of(_resolver(cluster_resolver.TorchrunClusterResolver)),
        errors=_NO_ENVIRON,
    ),
    "Kubernetes": Parser(
        [_POD],
        of(_resolver(cluster_resolver.KubernetesClusterResolver)),
        errors=(*_NO_ENVIRON, ImportError),
    ),
    "TPU": Parser(
        [_TPU],
        of(_resolver(cluster_resolver.TPUClusterResolver)),
        errors=_NO_ENVIRON,
    ),
    "another launcher": Parser(
        [_TORCHRUN, _SLURM],
        of(lambda text: find_unjoined_job(_variables(text))),
    ),
    "visible GPUs": Parser(
        ["0,1,2,3", "GPU-2b8c1c1e-3d2a", "MIG-2b8c1c1e", "-1"],
        of(lambda text: count_visible_gpus({VISIBLE: text})),
    ),
    "GPUs of a process": Parser(
        ["0", "0,1", " 3, 1"],
        of(parse_gpus),
        errors=(ValueError,),
    ),
    "address": Parser(
        ["host:2222", "[::1]:2222", "10.0.0.1:1"],
        of(lambda text: check_address(text, "it")),
        errors=(ValueError,),
    ),
    "time to wait": Parser(
        ["600", "1.5"],
        of(lambda text: read_timeout({TIMEOUT: text})),
        errors=(ValueError,),
    ),
    "doctor's child": Parser(
        ['{"stage": "jax", "begins": true}\n{"stage": "jax"}\n'],
        of(run_probe._parse_answers),
        is_text=False,
    ),
}


def _csv_state(directory: Any) -> Parse:
    import keras

    logger = keras.callbacks.CSVLogger(str(directory / "none.csv"))

    def parse(text: str) -> object:
        said = load_json(text, max_characters=1 << 26, has_nan=True)
        with callback_states.resuming_logs([logger], {"CSVLogger": said}):
            return logger.append

    return parse


def texts_for(name: str, directory: Any) -> tuple[list[str], Parse]:
    """Valid texts, and what parses one, for a parser by its name."""
    parser = PARSERS[name]
    documents = list(parser.documents)
    if parser.puts is not None and not documents:
        documents = manifest_texts(directory)
    elif parser.puts is not None and "/" in parser.puts:
        manifest_texts(directory)
    parse = parser.prepared(directory)
    return documents, parse


def put(
    name: str, directory: Any, text: str | bytes, draw: random.Random
) -> None:
    """Writes the file that a parser reads, if it reads one."""
    parser = PARSERS[name]
    if parser.puts is None:
        return
    assert isinstance(text, bytes)
    if name in ("manifest with its checksum", "checkpoints listed"):
        text = _signed(text)
    (directory / parser.puts).write_bytes(text)
