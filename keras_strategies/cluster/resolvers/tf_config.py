"""TF_CONFIG's text, parsed strictly.

It comes from outside and holds the addresses of a cluster: nothing but the
value at fault, cut short, goes into an error.
"""

import dataclasses
from typing import Any

from keras_strategies.cluster.addresses import parse_index, shown
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
        rpc_layer=_parse_text(config, "rpc_layer"),
        session_master=_parse_text(config, "session_master"),
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


def _parse_cluster(cluster: Any) -> ClusterSpec:
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


def _parse_text(config: dict[str, Any], name: str) -> str | None:
    text = config.get(name)
    if text is not None and not isinstance(text, str):
        raise TypeError(
            f'"{name}" in {VARIABLE} is a string. Received: {_named(text)}. '
            "Leave it out, or give a string."
        )
    return text


def _named(value: Any) -> str:
    """What kind of JSON a value is; itself only if it is short and simple."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return "null" if value is None else shown(value)
