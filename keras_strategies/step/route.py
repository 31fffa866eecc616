"""Decides which program runs a batch, from the traces of a model's step.

The first row of this table that fits decides:

| the step and the batch                             | program               |
|----------------------------------------------------|-----------------------|
| a layer stores a state for each row                | global                |
| the replicas cannot share the rows evenly, and with|                       |
| all of them                                        |                       |
| - it uses its replica context                      | ragged                |
| - it does not                                      | global, this once     |
| it fails with a replica's rows, or a hook or the   |                       |
| analysis found a reason for the global batch:      |                       |
| - it uses its replica context                      | none: an error        |
| - it does not                                      | global, from then on  |
| several batches, convolutions, training on CPU     | even, batch by batch  |
| several batches                                    | stacked               |
| one batch                                          | even                  |

A predict step may run on padding, so the replicas can always share its rows
evenly, unless it uses its replica context.
"""

import dataclasses
import enum
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from keras_strategies.keras_bridge.step_context import replica_use_error
from keras_strategies.passes import traces
from keras_strategies.step.analysis import Analysis, describe_error
from keras_strategies.step.record import Record


class Form(enum.Enum):
    """The programs of a step."""

    EVEN = "even"
    """Each replica computes the step on the same number of rows. Several
    batches run one after the other."""
    STACKED = "stacked"
    """The same, but several batches in a loop."""
    GLOBAL = "global"
    """The step is computed once over the rows of the global batch, which XLA
    shards over the devices."""
    RAGGED = "ragged"
    """Each replica computes the step on its own number of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """The program that runs batches of one shape, and why.

    Attributes:
      form: The program.
      reason: For a step that must see the global batch: why, as text.
      logs: Equations of logs to warn about; see `Analysis`.
      error: The error to raise instead of running a program, or None.
    """

    form: Form
    reason: str | None = None
    logs: Sequence[JaxprEqn] = ()
    error: Exception | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether the replicas run on the same number of rows."""
        return self.form in (Form.EVEN, Form.STACKED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Facts on which a route depends, besides the traces of the step.

    Attributes:
      steps: The number of batches.
      is_padded: Whether the replicas cannot share the rows evenly.
      may_pad: Whether the step may run on padding.
      avoids_loops: Whether convolutions are slow in loops: on CPU, XLA computes
        their gradients up to twenty times slower there (jaxlib 0.10.2).
      num_replicas: The number of replicas.
    """

    steps: int
    is_padded: bool
    may_pad: bool
    avoids_loops: bool
    num_replicas: int


def decide(record: Record, analysis: Analysis, batch: Circumstances) -> Route:
    """Decides which program runs a batch.

    Args:
      record: The trace of the step with a replica's rows; with all rows for a
        batch that the replicas cannot share evenly, unless it may be padded.
      analysis: What this trace and others show. Not needed for a batch that the
        replicas cannot share evenly.
      batch: The batch, and what else decides.
    """
    uses_replica = bool(record.replica_uses)
    if batch.is_padded and not batch.may_pad:
        return Route(form=Form.RAGGED if uses_replica else Form.GLOBAL)
    error = record.error
    if error is not None and batch.num_replicas == 1:
        return Route(form=Form.EVEN, error=error)
    reason = analysis.reason
    if error is not None:
        reason = record.reason or describe_error(error)
    if reason is not None:
        return Route(
            form=Form.GLOBAL,
            reason=reason,
            error=_refuse_replica(record, reason) if uses_replica else None,
        )
    if batch.is_padded and uses_replica:
        # Padding must not contribute to the collectives that the step calls.
        return Route(form=Form.RAGGED)
    has_loop = batch.steps > 1 and not (
        batch.avoids_loops and traces.has_convolutions(record.jaxpr)
    )
    form = Form.STACKED if has_loop else Form.EVEN
    return Route(form=form, logs=analysis.logs)


def _refuse_replica(record: Record, reason: str) -> Exception:
    """Returns the error of a step that needs a replica and the global batch."""
    name = record.replica_uses[0]
    if record.error is not None and record.reason is None:
        record.error.add_note(
            "The step was traced with the rows of one replica, because it uses "
            f"`{name}` of its replica context."
        )
        return record.error
    return replica_use_error(name, reason)
