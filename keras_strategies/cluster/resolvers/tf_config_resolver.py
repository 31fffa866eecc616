"""The cluster that the variable TF_CONFIG describes, parsed strictly.

It comes from outside and holds the addresses of a cluster: nothing but the
value at fault, cut short, goes into an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.addresses import parse_index, shown
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
    environ_or_own,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.cluster.tasks import check_addresses, check_roles
from keras_strategies.cluster.untrusted import load_json

VARIABLE = "TF_CONFIG"
"""The environment variable."""

MAX_CHARACTERS = 1 << 20
"""A longer text is refused."""

_EXAMPLE = (
    'Write it as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFConfig:
    """What TF_CONFIG says.

    Attributes:
      cluster: All tasks; empty if it does not say.
      task_type: The job of this process, None if it does not say.
      task_id: The index of this process in it, None if it does not say.
      rpc_layer: What goes before addresses, None if it does not say.
      session_master: tf 1's, None if it does not say.
    """

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG, at each call; as tf's.

    ```sh
    TF_CONFIG='{"cluster": {"chief": ["host0:2222"],
                            "worker": ["host1:2222", "host2:2222"]},
                "task": {"type": "worker", "index": 1}}'
    ```

    A cluster of workers only has worker 0 for its chief. Without TF_CONFIG,
    or with `{}`, there is no cluster.

    Differs from tf: the whole text is checked at each call (docs/parity.md).
    Everything but `environment` raises ValueError or TypeError for a TF_CONFIG
    that cannot be followed; the error does not repeat it.

    Args:
      task_type: The job of this process, in place of TF_CONFIG's.
      task_id: The index of this process in it, in place of TF_CONFIG's.
      rpc_layer: What `master()` puts before addresses, in place of
        TF_CONFIG's.
      environment: What `environment` answers.
      environ: The variables to read; None for those of this process.

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
        self._environ = environ_or_own(environ)

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of TF_CONFIG; empty if it has none."""
        return self._read().cluster

    @property
    def environment(self) -> str | None:
        """What was given."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process: as given, else TF_CONFIG's."""
        if self._task_type is None:
            return self._read().task_type
        return str(self._task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process: as given, else TF_CONFIG's."""
        if self._task_id is None:
            return self._read().task_id
        return parse_index(self._task_id, "`task_id`")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _find_rpc_layer(self) -> str | None:
        return self._read().rpc_layer

    def _chosen_layer(self, rpc_layer: str | None) -> str | None:
        if self._read().session_master is not None:
            return None
        return self.rpc_layer if rpc_layer is None else rpc_layer

    def _address_of_task(
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
        # What is not known is refused there.
        return spec.task_address(task_type, task_id)  # pyright: ignore[reportArgumentType]

    def _read(self) -> TFConfig:
        return parse_tf_config(self._environ.get(VARIABLE, ""))


def parse_tf_config(text: str) -> TFConfig:
    """Parses the value of TF_CONFIG. Keys that it does not know are let be.

    Args:
      text: A JSON object, or nothing.

    Raises:
      ValueError: it is no JSON, too long, says a key twice, or has a job,
        an address or an index that cannot be.
      TypeError: something in it is of another type than it should be.
    """
    config = load_tf_config(text)
    task = config.get("task", {})
    if not isinstance(task, dict):
        raise TypeError(
            f'"task" in {VARIABLE} is an object with "type" and "index". '
            f"Received: {_named(task)}. {_EXAMPLE}"
        )
    index = None
    if "index" in task:
        index = parse_index(task["index"], f'"index" of the task in {VARIABLE}')
    return TFConfig(
        cluster=_parse_cluster(config.get("cluster", {})),
        task_type=_parse_type(task),
        task_id=index,
        rpc_layer=text_in(config, "rpc_layer"),
        session_master=text_in(config, "session_master"),
    )


def load_tf_config(text: str) -> dict[str, Any]:
    """The JSON object that a TF_CONFIG is; `{}` for nothing.

    Args:
      text: A JSON object, or nothing.

    Raises:
      ValueError: it is no JSON, too long, or says a key twice.
      TypeError: it is another JSON value.
    """
    if not text.strip():
        return {}
    config = _load(text)
    if not isinstance(config, dict):
        raise TypeError(
            f"{VARIABLE} is a JSON object. Received: {_named(config)}. "
            f"{_EXAMPLE}"
        )
    return config


def text_in(config: dict[str, Any], name: str) -> str | None:
    """Returns an entry of a TF_CONFIG that is a text; None without one.

    Raises:
      TypeError: it is another value.
    """
    text = config.get(name)
    if text is not None and not isinstance(text, str):
        raise TypeError(
            f'"{name}" in {VARIABLE} is a string. Received: {_named(text)}. '
            "Leave it out, or give a string."
        )
    return text


def has_one_task(spec: ClusterSpec) -> bool:
    """Returns whether a cluster, which has a job, is of a single task."""
    # As tf: {"worker": {"1": ...}} has a place for task 0, too.
    return len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1


def _load(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{VARIABLE} has at most {MAX_CHARACTERS} characters. Received: "
            f"{len(text)} characters. Leave out what is not the cluster or "
            "the task."
        )
    try:
        return load_json(text, max_characters=MAX_CHARACTERS)
    except ValueError as error:
        fault = str(error)
    raise ValueError(
        f"{VARIABLE} is no JSON that is read: {fault}. Received: {len(text)} "
        f"characters. {_EXAMPLE}"
    )


def _parse_cluster(cluster: object) -> ClusterSpec:
    if not isinstance(cluster, dict):
        raise TypeError(
            f'"cluster" in {VARIABLE} maps jobs to addresses. Received: '
            f"{_named(cluster)}. {_EXAMPLE}"
        )
    spec = ClusterSpec(cluster)
    check_roles(spec)
    check_addresses(spec)
    return spec


def _parse_type(task: dict[str, Any]) -> str | None:
    if "type" not in task:
        return None
    name = task["type"]
    if not isinstance(name, str):
        raise TypeError(
            f'"type" of the task in {VARIABLE} is a string. Received: '
            f"{_named(name)}. {_EXAMPLE}"
        )
    check_roles(ClusterSpec({name: []}))
    return name


def _named(value: object) -> str:
    """What kind of JSON a value is; itself only if it is short and simple."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return "null" if value is None else shown(value)
