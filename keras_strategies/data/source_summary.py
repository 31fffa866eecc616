"""The summary of a source that `explain_input` shows, without reading."""

import dataclasses
import enum
from collections.abc import Mapping

from keras_strategies.data.options import AutoShardPolicy


class Reading(enum.Enum):
    """The rows that each process reads of data that is not process-local.

    Attributes:
      ROWS: Only its rows.
      PIPELINE: All rows, of which it keeps its share.
      REPLICAS: Batches for each of its replicas.
    """

    ROWS = "each process reads only its rows of each batch"
    PIPELINE = "each process runs the entire pipeline and keeps its rows"
    REPLICAS = "each replica takes entire batches from its process's dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A source's description of itself, made without reading.

    Attributes:
      applied: The policy that several processes follow.
      reason: The reason for it, as the end of a sentence: "because ...".
      asked: The policy that the dataset or the user chose, if the source knows
        it. Then `applied` and `reason` hold for one process, too.
      reading: The rows that each process reads.
      num_rows: Number of rows in the `num_batches` of an epoch, if known.
      first_rows: Number of rows of the first batch, if known; others may
        differ.
      files: The files of each process, as far as this process knows them.
      notes: Further remarks, in sentences.
    """

    applied: AutoShardPolicy
    reason: str
    asked: AutoShardPolicy | None = None
    reading: Reading = Reading.PIPELINE
    num_rows: int | None = None
    first_rows: int | None = None
    files: Mapping[int, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    notes: tuple[str, ...] = ()
