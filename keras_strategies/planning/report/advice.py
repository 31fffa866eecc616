"""Writes advice on how to make a planned training step fit or run faster."""

from keras_strategies.planning.report.planned_step import (
    PlannedStep,
    format_gb,
)

_MUCH = 0.5
_LESS = 0.9
_LARGE = 0.3
_SLOW = 1.5
_SECONDS = 1e-3
"""The shortest communication time about which advice is given."""
_LOW = 0.05
"""The utilization below which the most expensive operations are listed."""


def write_advice(
    step: PlannedStep,
    *,
    remat: tuple[float | None, float | None] = (None, None),
    has_remat: bool = False,
) -> str:
    """Returns advice on a planned step, or "" if it needs none.

    Args:
      step: The planned step.
      remat: The bytes that the step needs on a device, first without and then
        with a `keras.RematScope` around the model's blocks. None if unknown.
      has_remat: Whether layers of the model are already rematerialized, or
        cannot be.
    """
    if step.error is not None or step.bytes_in_all is None:
        return ""
    before, after = remat
    if before is not None and after is not None and after < _LESS * before:
        return (
            "Create the model's blocks in `keras.RematScope(mode="
            "'list_of_layers', layer_names=...)`, with their names. It reduces "
            f"the memory from {format_gb(before)} to {format_gb(after)} GB."
        )
    if step.fits is False:
        return _advise_on_size(step, step.bytes_in_all, has_remat)
    sentences = _advise_on_memory(step, step.bytes_in_all), _explain_time(step)
    return " ".join(filter(None, sentences))


def advise_on_logits(step: PlannedStep, logit_bytes: float) -> str:
    """Returns advice on logits that take much of a planned step's memory.

    Args:
      step: The planned step.
      logit_bytes: The bytes that `blocked_head` would save on a device.
    """
    if not logit_bytes or logit_bytes < _LARGE * (step.bytes_in_all or 0.0):
        return ""
    return (
        f"Logits take {format_gb(logit_bytes)} GB. "
        "`ks.experimental.blocked_head(model)` computes the loss without "
        "storing them (docs/large_models.md)."
    )


def _advise_on_memory(step: PlannedStep, total: float) -> str:
    """Returns advice on a planned step that fits the memory."""
    if step.estimate is not None and step.max_rows:
        bounds = step.estimate.bounds
        links, compute = bounds["links"], bounds["compute"]
        rows = step.rows / max(step.num_replicas, 1)
        is_slow = links > _SLOW * compute and links > _SECONDS
        if is_slow and step.max_rows > _SLOW * rows:
            return (
                "Communication takes longer than computation, so more rows per "
                f"replica (up to {step.max_rows} fit) add little time."
            )
    spare = (step.limit_bytes or 0) - total
    if spare < 0.05 * (step.limit_bytes or 0) and step.limit_bytes:
        return (
            f"Only {format_gb(max(spare, 0))} GB are left, so the step may no "
            "longer fit after a small change."
        )
    return ""


def _explain_time(step: PlannedStep) -> str:
    """Returns what takes the time of a step that uses little of a chip."""
    times = step.estimate
    if times is None:
        return ""
    if times.host_seconds >= times.seconds:
        return (
            "Python starts a step no faster than in "
            f"{times.host_seconds * 1e3:.2g} ms, and the device computes it in "
            "less. Use a larger batch, or several steps in one program: "
            "`compile(steps_per_execution=...)`, or a loop in the function "
            "that `run` calls."
        )
    if times.utilization is None or times.utilization >= _LOW:
        return ""
    longest = sorted(step.top_operations.items(), key=lambda x: x[1])[::-1][:2]
    named = [
        f"{name} ({seconds * 1e3:.3g} ms)"
        for name, seconds in longest
        if seconds > _LOW * times.seconds
    ]
    if not named:
        return ""
    return (
        f"The most expensive operations of the {times.seconds * 1e3:.3g} ms "
        f"are {' and '.join(named)}."
    )


def _advise_on_size(step: PlannedStep, total: float, has_remat: bool) -> str:
    """Returns advice on a planned step that does not fit the memory."""
    memory, limit = step.memory, step.limit_bytes or 0
    slots = memory.get("slots", 0.0)
    state = memory.get("weights", 0.0) + slots
    # A partitioner with options is named by its class.
    is_sharded = step.layout.startswith(("sharded", "FullySharded"))
    is_large = state > _MUCH * limit and step.num_replicas > 1
    if is_large and not is_sharded:
        return (
            f"Weights and optimizer slots take {format_gb(state)} GB on every "
            "device. Shard them with `ks.experimental.FullySharded()`."
        )
    if step.max_rows and not is_large:
        return (
            f"At most {step.max_rows} rows per replica fit. To update from "
            "more, pass `gradient_accumulation_steps` to the optimizer."
        )
    if memory.get("activations", 0) > _MUCH * total and not is_large:
        fix = "use a layout with a model axis, such as 'model:4'"
        if not has_remat:
            fix = (
                "create its blocks in a `keras.RematScope` (without `Dropout`, "
                f"which Keras cannot rematerialize), or {fix}"
            )
        return f"One row needs too much memory. To fit the model, {fix}."
    fix = "Use devices with more memory, or shard the state."
    if is_sharded:
        fix = (
            "Shard over more replicas (with a larger `shards`), or use "
            "more devices."
        )
    if slots and total - slots <= limit:
        fix += (
            f" Or let the host store the {format_gb(slots)} GB of slots: pass "
            "`offload='optimizer'` to the partitioner (docs/large_models.md)."
        )
    return fix
