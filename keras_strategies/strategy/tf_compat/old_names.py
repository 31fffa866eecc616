"""Names of tf.distribute that have no meaning here, and what to use."""

from typing import Any

INSTEAD = {
    # Strategy.
    "colocate_vars_with": "`strategy.extended.colocate_vars_with`",
    "configure": "nothing: there is no session to configure",
    "experimental_run": "`run`, in a loop over a distributed dataset",
    "group": "nothing: what a function returns is computed",
    "make_dataset_iterator": "`iter(experimental_distribute_dataset(...))`",
    "make_input_fn_iterator": "`iter(distribute_datasets_from_function(...))`",
    "unwrap": "`experimental_local_results`",
    "update_config_proto": "nothing: there is no session to configure",
    # StrategyExtended.
    "assign_to_logical_device": "`TPUStrategy(layout_map=...)`",
    "experimental_assign_to_logical_device": "`TPUStrategy(layout_map=...)`",
    "experimental_logical_device": "`TPUStrategy(layout_map=...)`",
    "experimental_make_numpy_dataset": (
        "`strategy.experimental_make_numpy_dataset`"
    ),
    "experimental_run_steps_on_iterator": (
        "`steps_per_execution` of `compile`, or `run` in a loop"
    ),
    "experimental_replicate_to_logical_devices": (
        "`TPUStrategy(layout_map=...)`"
    ),
    "experimental_split_to_logical_devices": "`TPUStrategy(layout_map=...)`",
    "replicate_to_logical_devices": "`TPUStrategy(layout_map=...)`",
    "split_to_logical_devices": "`TPUStrategy(layout_map=...)`",
}


def missing(owner: Any, name: str) -> AttributeError:
    """The error for an attribute that an object does not have.

    Args:
      owner: A strategy, or its `extended`.
      name: The attribute.
    """
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in INSTEAD:
        text += (
            f". It is a name of tf.distribute without a meaning on JAX. Use "
            f"{INSTEAD[name]}."
        )
    return AttributeError(text, name=name, obj=owner)
