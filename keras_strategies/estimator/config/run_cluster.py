"""The cluster of a `RunConfig`, as TF_CONFIG describes it."""

import dataclasses
from typing import Any

from keras_strategies.cluster.addresses import shown, with_rpc_layer
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    VARIABLE,
    has_one_task,
    load_tf_config,
    parse_tf_config,
    text_in,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.cluster.tasks import num_tasks

CHIEF, WORKER, EVALUATOR, SERVER = "chief", "worker", "evaluator", "ps"
_RPC_LAYER = "grpc"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCluster:
    """A process's place, in the words of `tf.estimator.RunConfig`.

    Attributes:
      cluster_spec: The training cluster; empty for a local run and for an
        evaluator, which is none of it.
      task_type: "chief", "worker", "ps" or "evaluator".
      task_id: The index of this process among those of its type.
      master: "grpc://host:port" of this process; "" where it is alone, and
        for an evaluator.
      evaluation_master: TF_CONFIG's "eval_session_master", else "".
      is_chief: Whether this process is the training cluster's chief.
      num_ps_replicas: Number of parameter servers.
      num_worker_replicas: Number of processes that train, the chief's
        included; 0 for an evaluator.
      global_id_in_cluster: Number of this process in the training cluster:
        the chief, the workers, then the servers; None for an evaluator.
      service: TF_CONFIG's "service", whatever a platform writes there.
      model_dir: TF_CONFIG's "model_dir".
    """

    cluster_spec: ClusterSpec = dataclasses.field(
        default_factory=lambda: ClusterSpec({})
    )
    task_type: str = WORKER
    task_id: int = 0
    master: str = ""
    evaluation_master: str = ""
    is_chief: bool = False
    num_ps_replicas: int = 0
    num_worker_replicas: int = 0
    global_id_in_cluster: int | None = None
    service: dict[str, Any] | None = None
    model_dir: str | None = None


def cluster_of(text: str, *, needs_chief: bool) -> RunCluster:
    """A process's place from the text of TF_CONFIG.

    Args:
      text: The variable's value; "" where it is not set.
      needs_chief: Whether a cluster has a "chief". Where it need not, worker
        0 is the chief of a cluster without, as for
        `MultiWorkerMirroredStrategy`.

    Raises:
      ValueError: TF_CONFIG cannot be followed; its cluster lacks a chief or
        this process's task, or its "model_dir" is empty.
      TypeError: "service" is no object, or a value of another type than it
        should be.
    """
    raw = load_tf_config(text)
    config = parse_tf_config(text)
    place = RunCluster(
        service=_checked_service(raw),
        model_dir=_checked_model_dir(raw),
        evaluation_master=text_in(raw, "eval_session_master") or "",
        master=config.session_master or "",
    )
    spec, asked = config.cluster, (config.task_type, config.task_id)
    if not spec:
        _check_local(*asked)
        return dataclasses.replace(
            place, is_chief=True, num_worker_replicas=1, global_id_in_cluster=0
        )
    task = _checked_task(spec, *asked, needs_chief)
    place = dataclasses.replace(place, task_type=task[0], task_id=task[1])
    if task[0] == EVALUATOR:
        return dataclasses.replace(place, master="")
    if config.session_master is None:
        place = dataclasses.replace(place, master=_own_address(spec, *task))
    return dataclasses.replace(
        place,
        cluster_spec=spec,
        evaluation_master="",
        is_chief=_is_chief(spec, *task),
        num_ps_replicas=num_tasks(spec, SERVER),
        num_worker_replicas=num_tasks(spec, CHIEF) + num_tasks(spec, WORKER),
        global_id_in_cluster=_global_id(spec, *task),
    )


def _checked_service(raw: dict[str, Any]) -> dict[str, Any] | None:
    name, service = f'"service" in {VARIABLE}', raw.get("service")
    cure = "Write an object, or leave it out."
    check_type(name, service, dict | None, "a dict", cure)
    return service


def _checked_model_dir(raw: dict[str, Any]) -> str | None:
    directory = text_in(raw, "model_dir")
    if directory == "":
        raise ValueError(
            f"model_dir in {VARIABLE} should be non-empty. Received: ''. Write "
            "a path, or leave it out."
        )
    return directory


def _check_local(task_type: str | None, task_id: int | None) -> None:
    if task_type not in (None, WORKER):
        raise ValueError(
            f'If "cluster" is not set in {VARIABLE}, task type must be '
            f"'{WORKER}'. Received: {shown(task_type)}. Give the cluster, or "
            "leave the task out for a local run."
        )
    if task_id not in (None, 0):
        raise ValueError(
            f'If "cluster" is not set in {VARIABLE}, task index must be 0. '
            f"Received: {task_id}. Give the cluster, or leave the task out "
            "for a local run."
        )


def _checked_task(
    spec: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    needs_chief: bool,
) -> tuple[str, int]:
    if not num_tasks(spec, CHIEF) and (
        needs_chief or not num_tasks(spec, WORKER)
    ):
        raise ValueError(
            f'If "cluster" is set in {VARIABLE}, it must have one "{CHIEF}" '
            f"node. Received: the jobs {shown(spec.jobs)}. Rename one worker "
            "to 'chief', or pass `train_distribute="
            "MultiWorkerMirroredStrategy()`, whose worker 0 is the chief."
        )
    if not task_type or task_id is None:
        missing = "type" if not task_type else "index"
        raise ValueError(
            f'If "cluster" is set in {VARIABLE}, task {missing} must be set. '
            f"Received: a cluster, and no {missing}. Write "
            '"task": {"type": "worker", "index": 0}.'
        )
    if task_type == EVALUATOR:
        return task_type, task_id
    if task_type not in spec.jobs:
        raise ValueError(
            f"{shown(task_type)} is not a valid task_type in the cluster_spec."
            f" Received: a cluster with the jobs {shown(spec.jobs)}. These "
            f"values come from {VARIABLE}: correct its task or its cluster."
        )
    if task_id not in spec.task_indices(task_type):
        raise ValueError(
            f"{task_id} is not a valid task_id for task_type {task_type} in "
            f"the cluster_spec. Received: {spec.num_tasks(task_type)} such "
            f"tasks. These values come from {VARIABLE}: indices count from 0."
        )
    return task_type, task_id


def _own_address(spec: ClusterSpec, task_type: str, task_id: int) -> str:
    if has_one_task(spec):
        return ""
    return with_rpc_layer(spec.task_address(task_type, task_id), _RPC_LAYER)


def _is_chief(spec: ClusterSpec, task_type: str, task_id: int) -> bool:
    if num_tasks(spec, CHIEF):
        return task_type == CHIEF
    return task_type == WORKER and task_id == 0


def _global_id(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    before = {
        CHIEF: (),
        # An evaluator that the cluster lists is counted, as in tf.
        EVALUATOR: (CHIEF,),
        WORKER: (CHIEF, EVALUATOR),
        SERVER: (CHIEF, EVALUATOR, WORKER),
    }
    return task_id + sum(num_tasks(spec, job) for job in before[task_type])
