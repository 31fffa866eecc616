"""Parses the cluster of a `RunConfig` from TF_CONFIG."""

from typing import Any

from keras_strategies.estimator.seam import (
    VARIABLE,
    ClusterSpec,
    count_tasks,
    load_tf_config,
    parse_tf_config,
    read_string,
    shorten,
)

CHIEF, WORKER, EVALUATOR, SERVER = "chief", "worker", "evaluator", "ps"


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
      ValueError: if TF_CONFIG is invalid, or its cluster does not contain a
        chief or this process's task.
      TypeError: if a value has the wrong type.
    """
    config = parse_tf_config(text)
    spec = config.cluster
    place = {
        "cluster_spec": ClusterSpec({}),
        "task_type": config.task_type or WORKER,
        "task_id": config.task_id or 0,
        "model_dir": read_string(load_tf_config(text), "model_dir"),
        "is_chief": not spec,
        "num_ps_replicas": 0,
        "num_worker_replicas": 0 if spec else 1,
    }
    task = place["task_type"], place["task_id"]
    if not spec:
        if task != (WORKER, 0):
            raise ValueError(
                f'If "cluster" is not set in {VARIABLE}, the task must be '
                f"'{WORKER}' 0. Received: {shorten(task)}. Add the cluster, or "
                "omit the task for a local run."
            )
        return place
    num_chiefs = count_tasks(spec, CHIEF)
    num_workers = count_tasks(spec, WORKER)
    if not num_chiefs and (needs_chief or not num_workers):
        raise ValueError(
            f'A "cluster" in {VARIABLE} must have one "{CHIEF}" node. '
            f"Received: {shorten(spec.jobs)}. Make a worker the chief, or pass "
            "`train_distribute=ks.MultiWorkerMirroredStrategy()`."
        )
    if config.task_type is None or config.task_id is None:
        raise ValueError(
            f'With a "cluster", {VARIABLE} must have a task with a type and an '
            'index. Add, for example, "task": {"type": "worker", "index": 0}.'
        )
    if task[0] == EVALUATOR:
        # It is no part of the training cluster.
        return place
    spec.task_address(*task)  # Raises ValueError for an unknown task.
    is_chief = task[0] == CHIEF or (not num_chiefs and task == (WORKER, 0))
    return place | {
        "cluster_spec": spec,
        "is_chief": is_chief,
        "num_ps_replicas": count_tasks(spec, SERVER),
        "num_worker_replicas": num_chiefs + num_workers,
    }
