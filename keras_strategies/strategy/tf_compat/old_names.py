"""Replacements for tf.distribute names that have no meaning in JAX."""

_LAYOUT = "`TPUStrategy(layout_map=...)`"
_PROCESS = "`jax.process_index() == 0`, because only process 0 writes"
_EVERYWHERE = "not needed, because every variable has a copy on every device"

OF_STRATEGY = {
    "colocate_vars_with": _EVERYWHERE,
    "configure": "not needed, because there is no session to configure",
    "experimental_run": "`run`, in a loop over a distributed dataset",
    "group": "not needed, because all results of a function are computed",
    "make_dataset_iterator": "`iter(experimental_distribute_dataset(...))`",
    "make_input_fn_iterator": "`iter(distribute_datasets_from_function(...))`",
    "unwrap": "`experimental_local_results`",
    "update_config_proto": (
        "not needed, because there is no session to configure"
    ),
}
OF_EXTENDED = {
    "assign_to_logical_device": _LAYOUT,
    "colocate_vars_with": _EVERYWHERE,
    "experimental_assign_to_logical_device": _LAYOUT,
    "experimental_logical_device": _LAYOUT,
    "experimental_make_numpy_dataset": (
        "`strategy.experimental_make_numpy_dataset`"
    ),
    "experimental_replicate_to_logical_devices": _LAYOUT,
    "experimental_require_static_shapes": (
        "not needed, because a program is compiled for each batch shape"
    ),
    "experimental_run_steps_on_iterator": (
        "`steps_per_execution` of `model.compile`, or `run` in a loop"
    ),
    "experimental_should_init": (
        "not needed, because each process creates its variables"
    ),
    "experimental_split_to_logical_devices": _LAYOUT,
    "non_slot_devices": "`worker_devices`",
    "read_var": "`variable.value`",
    "replicate_to_logical_devices": _LAYOUT,
    "should_checkpoint": _PROCESS,
    "should_save_summary": _PROCESS,
    "split_to_logical_devices": _LAYOUT,
    "update_non_slot": "`update`, with the variable that the function changes",
    "value_container": "not needed, because a variable is a single object",
}
_INSTEAD = OF_EXTENDED | OF_STRATEGY


def make_missing_error(owner: object, name: str) -> AttributeError:
    """Returns the error for a missing attribute, with its replacement.

    Args:
      owner: A strategy, or its `extended`.
      name: The attribute.
    """
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in _INSTEAD:
        text += (
            ". This name of tf.distribute does not apply to JAX. Replacement: "
            f"{_INSTEAD[name]}."
        )
    return AttributeError(text, name=name, obj=owner)
