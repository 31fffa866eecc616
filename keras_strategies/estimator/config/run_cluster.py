"""Parses the cluster of a `RunConfig` from TF_CONFIG."""

from typing import Any

from keras_strategies.estimator.seam import (
    VARIABLE,
    ClusterSpec,
    add_rpc_layer,
    check_type,
    count_tasks,
    has_one_task,
    load_tf_config,
    parse_tf_config,
    read_string,
    shorten,
)

CHIEF, WORKER, EVALUATOR, SERVER = "chief", "worker", "evaluator", "ps"
_RPC_LAYER = "grpc"


def parse_cluster(text: str, *, needs_chief: bool) -> dict[str, Any]:
    """Parses the cluster and this process's task from TF_CONFIG.

    Args:
      text: The value of the environment variable; "" if it is not set.
      needs_chief: Whether a cluster must have a "chief". If false, worker 0
        acts as the chief of a cluster without a "chief", as it does in
        `MultiWorkerMirroredStrategy`.

    Returns:
      The attributes of a `RunConfig` that are not arguments, and TF_CONFIG's
      "model_dir", or None.

    Raises:
      ValueError: if TF_CONFIG is invalid, its cluster does not contain a chief
        or this process's task, or its "model_dir" is empty.
      TypeError: if "service" is not a JSON object, or a value has the wrong
        type.
    """
    raw = load_tf_config(text)
    config = parse_tf_config(text)
    spec, raw_task = config.cluster, (config.task_type, config.task_id)
    place = {
        "cluster_spec": ClusterSpec({}),
        "task_type": WORKER,
        "task_id": 0,
        "service": _read_service(raw),
        "model_dir": _read_model_dir(raw),
        "evaluation_master": read_string(raw, "eval_session_master") or "",
        "master": config.session_master or "",
        "is_chief": not spec,
        "num_ps_replicas": 0,
        "num_worker_replicas": 0 if spec else 1,
        "global_id_in_cluster": None if spec else 0,
    }
    if not spec:
        _check_local(*raw_task)
        return place
    task = _validate_task(spec, *raw_task, needs_chief)
    place |= {"task_type": task[0], "task_id": task[1]}
    if task[0] == EVALUATOR:
        # It is no part of the training cluster.
        return place | {"master": ""}
    if config.session_master is None:
        place["master"] = _find_address(spec, *task)
    return place | {
        "cluster_spec": spec,
        "evaluation_master": "",
        "is_chief": _is_chief(spec, *task),
        "num_ps_replicas": count_tasks(spec, SERVER),
        "num_worker_replicas": count_tasks(spec, CHIEF)
        + count_tasks(spec, WORKER),
        "global_id_in_cluster": _compute_global_id(spec, *task),
    }


def _read_service(raw: dict[str, Any]) -> dict[str, Any] | None:
    name, service = f'"service" in {VARIABLE}', raw.get("service")
    fix = "Set it to a JSON object, or omit it."
    check_type(name, service, dict | None, "a dict", fix)
    return service


def _read_model_dir(raw: dict[str, Any]) -> str | None:
    directory = read_string(raw, "model_dir")
    if directory == "":
        raise ValueError(
            f"model_dir in {VARIABLE} should be non-empty. Received: ''. Set "
            "it to a path, or omit it."
        )
    return directory


def _check_local(task_type: str | None, task_id: int | None) -> None:
    if task_type not in (None, WORKER):
        raise ValueError(
            f'If "cluster" is not set in {VARIABLE}, task type must be '
            f"'{WORKER}'. Received: {shorten(task_type)}. Add the cluster, or "
            "omit the task for a local run."
        )
    if task_id not in (None, 0):
        raise ValueError(
            f'If "cluster" is not set in {VARIABLE}, task index must be 0. '
            f"Received: {task_id}. Add the cluster, or omit the task for a "
            "local run."
        )


def _validate_task(
    spec: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    needs_chief: bool,
) -> tuple[str, int]:
    if not count_tasks(spec, CHIEF) and (
        needs_chief or not count_tasks(spec, WORKER)
    ):
        raise ValueError(
            f'If "cluster" is set in {VARIABLE}, it must have one "{CHIEF}" '
            f"node. Received: the jobs {shorten(spec.jobs)}. Make one worker "
            "the 'chief', or pass `train_distribute="
            "MultiWorkerMirroredStrategy()`, whose worker 0 is the chief."
        )
    if not task_type or task_id is None:
        missing = "type" if not task_type else "index"
        raise ValueError(
            f'If "cluster" is set in {VARIABLE}, task {missing} must be set. '
            'Add a task such as "task": {"type": "worker", "index": 0}.'
        )
    if task_type == EVALUATOR:
        return task_type, task_id
    if task_type not in spec.jobs:
        raise ValueError(
            f"{shorten(task_type)} is not a valid task_type in the "
            "cluster_spec. Received: a cluster with the jobs "
            f"{shorten(spec.jobs)}. These values come from {VARIABLE}. Correct "
            "the task or the cluster in it."
        )
    if task_id not in spec.task_indices(task_type):
        raise ValueError(
            f"{task_id} is not a valid task_id for task_type {task_type} in "
            f"the cluster_spec. Received: a cluster with "
            f"{spec.num_tasks(task_type)} such tasks. These values come from "
            f"{VARIABLE}. Correct the task or the cluster there. Task indices "
            "start at 0."
        )
    return task_type, task_id


def _find_address(spec: ClusterSpec, task_type: str, task_id: int) -> str:
    if has_one_task(spec):
        return ""
    return add_rpc_layer(spec.task_address(task_type, task_id), _RPC_LAYER)


def _is_chief(spec: ClusterSpec, task_type: str, task_id: int) -> bool:
    if count_tasks(spec, CHIEF):
        return task_type == CHIEF
    return task_type == WORKER and task_id == 0


def _compute_global_id(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    before = {
        CHIEF: (),
        # An evaluator that the cluster lists is counted too, as in TensorFlow.
        EVALUATOR: (CHIEF,),
        WORKER: (CHIEF, EVALUATOR),
        SERVER: (CHIEF, EVALUATOR, WORKER),
    }
    return task_id + sum(count_tasks(spec, job) for job in before[task_type])
