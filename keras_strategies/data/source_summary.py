"""The summary of a source that `explain_input` shows, without reading data."""

import dataclasses
import enum
from collections.abc import Mapping

from keras_strategies.data.options import AutoShardPolicy


class Reading(enum.Enum):
    """The way in which each process reads data that is not process-local.

    Attributes:
      ROWS: The process reads only its own rows.
      PIPELINE: The process reads all rows and discards the rows of the other
        processes.
      REPLICAS: The process reads an entire batch for each of its replicas.
    """

    ROWS = "each process reads only its own rows of each batch"
    PIPELINE = "each process runs the entire pipeline and uses only its rows"
    REPLICAS = "each replica gets entire batches from its process's dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A source's description of how it is read, made without reading data.

    Attributes:
      applied: The policy by which the data is divided among processes.
      reason: The reason for `applied`, as the end of a sentence: "because ...".
      asked: The policy that the dataset or the user requested, if the source
        knows it. If it is set, `applied` and `reason` are also valid for a job
        with a single process.
      reading: How each process reads the data.
      num_rows: Number of rows in an epoch of `num_batches` batches, if known.
      first_rows: Number of rows in the first batch, if known; other batches may
        have more or fewer rows.
      files: The files that each process reads, as far as this process knows
        them.
      notes: Further remarks, as full sentences.
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
