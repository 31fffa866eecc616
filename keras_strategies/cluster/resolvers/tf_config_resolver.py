"""A resolver for the environment variable TF_CONFIG, which is parsed strictly.

TF_CONFIG is untrusted input and contains a cluster's addresses. Error messages
therefore quote only the invalid value, truncated, and never the entire text.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.addresses import parse_index, shorten
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.cluster.tasks import check_addresses, check_roles
from keras_strategies.cluster.untrusted import load_json

VARIABLE = "TF_CONFIG"
"""The name of the environment variable."""

MAX_CHARACTERS = 1 << 20
"""The maximum length of TF_CONFIG."""

# Keys that tf or its Estimators read, and those of Google's AI Platform.
_KEYS_BESIDE_A_CLUSTER = frozenset(
    [
        "task",
        "rpc_layer",
        "session_master",
        "eval_session_master",
        "service",
        "model_dir",
        "environment",
        "job",
        "trial",
    ]
)
_EXAMPLE = (
    'Write it as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFConfig:
    """The contents of TF_CONFIG.

    Attributes:
      cluster: The addresses of the cluster's tasks; empty if unset.
      task_type: The job of this process; None if unset.
      task_id: The index of this process in its job; None if unset.
      rpc_layer: The protocol to prepend to addresses; None if unset.
      session_master: The address of TensorFlow 1's session master; None if
        unset.
    """

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


class TFConfigClusterResolver(ClusterResolver):
    """A resolver for the cluster that TF_CONFIG describes, as in TensorFlow.

    Each call reads TF_CONFIG again.

    ```sh
    TF_CONFIG='{"cluster": {"chief": ["host0:2222"],
                            "worker": ["host1:2222", "host2:2222"]},
                "task": {"type": "worker", "index": 1}}'
    ```

    If all tasks of the cluster are workers, worker 0 is the chief. If
    TF_CONFIG is not set, or is `{}`, there is no cluster.

    Differs from tf: the entire text is checked at each call (docs/parity.md).
    Methods and properties that read TF_CONFIG raise ValueError or TypeError if
    it is invalid. The error does not quote the entire text.

    Args:
      task_type: The job of this process. None: the one in TF_CONFIG.
      task_id: The index of this process in its job. None: the one in
        TF_CONFIG.
      rpc_layer: The protocol that `master()` prepends to addresses. None: the
        one in TF_CONFIG.
      environment: The value of the property `environment`.
      environ: The environment variables; None for those of this process.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver

    Example:
      >>> text = '''{"cluster": {"worker": ["host0:2222", "host1:2222"]},
      ...           "task": {"type": "worker", "index": 1}}'''
      >>> resolver = ks.cluster_resolver.TFConfigClusterResolver(
      ...     environ={"TF_CONFIG": text}
      ... )
      >>> resolver.task_type, resolver.task_id
      ('worker', 1)
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._environ = environ

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs in TF_CONFIG; the result is empty if it has none."""
        return self._read().cluster

    @property
    def environment(self) -> str | None:
        """The argument `environment` of the constructor."""
        return self._environment

    def _find_task_type(self) -> str | None:
        return self._read().task_type

    @ClusterResolver.task_id.getter
    def task_id(self) -> int | None:
        """Returns the index that was set, else the one in TF_CONFIG."""
        if self._task_id is None:
            return self._read().task_id
        return parse_index(self._task_id, "`task_id`")

    def _find_rpc_layer(self) -> str | None:
        return self._read().rpc_layer

    def _choose_layer(self, rpc_layer: str | None) -> str | None:
        if self._read().session_master is not None:
            return None
        return self.rpc_layer if rpc_layer is None else rpc_layer

    def _find_address(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        config = self._read()
        if config.session_master is not None:
            return config.session_master
        spec = config.cluster
        if not spec or has_one_task(spec):
            return None
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        # `task_address` raises ValueError for an unknown task, including None.
        return spec.task_address(task_type, task_id)  # pyright: ignore[reportArgumentType]

    def _read(self) -> TFConfig:
        return parse_tf_config(self._environ_now.get(VARIABLE, ""))


def parse_tf_config(text: str) -> TFConfig:
    """Parses the value of TF_CONFIG. Unknown keys beside a cluster are ignored.

    Args:
      text: A JSON object, or "".

    Raises:
      ValueError: if the text is not JSON, is too long, or has a duplicate key,
        an invalid job, address or index, or unknown keys but no cluster.
      TypeError: if a value in the JSON object has a wrong type.
    """
    config = load_tf_config(text)
    task = _check(config.get("task", {}), dict, f'"task" in {VARIABLE}')
    jobs = config.pop("cluster", {})
    cluster = ClusterSpec(_check(jobs, dict, f'"cluster" in {VARIABLE}'))
    check_roles(cluster)
    check_addresses(cluster)
    if not cluster:
        _check_keys(config)
    index = task_type = None
    if "index" in task:
        index = parse_index(task["index"], f'"index" of the task in {VARIABLE}')
    if "type" in task:
        name = f'"type" of the task in {VARIABLE}'
        task_type = _check(task["type"], str, name)
        check_roles(ClusterSpec({task_type: []}))
    return TFConfig(
        cluster=cluster,
        task_type=task_type,
        task_id=index,
        rpc_layer=read_string(config, "rpc_layer"),
        session_master=read_string(config, "session_master"),
    )


def load_tf_config(text: str) -> dict[str, Any]:
    """Parses the value of TF_CONFIG to a dict; returns `{}` for an empty text.

    Args:
      text: A JSON object, or "".

    Raises:
      ValueError: if the text is not JSON, is too long or has a duplicate key.
      TypeError: if the text is JSON, but not a JSON object.
    """
    try:
        config = load_json(text.strip() or "{}", max_characters=MAX_CHARACTERS)
    except ValueError as error:
        problem = str(error)
    else:
        return _check(config, dict, VARIABLE)
    raise ValueError(
        f"{VARIABLE} must be valid JSON with at most {MAX_CHARACTERS} "
        f"characters, but {problem}. Received: {len(text)} characters. "
        f"{_EXAMPLE}"
    )


def read_string(config: dict[str, Any], name: str) -> str | None:
    """Returns the string under a key of TF_CONFIG, or None if it is missing.

    Raises:
      TypeError: if the entry is not a string.
    """
    text = config.get(name)
    return (
        None if text is None else _check(text, str, f'"{name}" in {VARIABLE}')
    )


def has_one_task(spec: ClusterSpec) -> bool:
    """Returns whether a non-empty cluster has a single task."""
    # As in TensorFlow, {"worker": {"1": ...}} counts as two tasks, because the
    # missing task 0 is counted, too.
    return len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1


def _check_keys(config: dict[str, Any]) -> None:
    """Raises an error if another key than "cluster" may contain the cluster."""
    unknown = [key for key in config if key not in _KEYS_BESIDE_A_CLUSTER]
    if not unknown:
        return
    raise ValueError(
        f'The jobs in {VARIABLE} must be under the key "cluster". Received: '
        f"the keys {shorten(unknown)}. Without a cluster, each "
        "process would train separately and write to the same files. "
        f"{_EXAMPLE}"
    )


def _check(value: Any, kind: type, name: str) -> Any:
    """Returns a JSON value if it is of a type; otherwise raises TypeError."""
    if isinstance(value, kind):
        return value
    shown = {dict: "an object", list: "an array", type(None): "null"}
    raise TypeError(
        f"{name} must be {'a string' if kind is str else 'a JSON object'}. "
        f"Received: {shown.get(type(value)) or shorten(value)}. {_EXAMPLE}"
    )
