"""The summary of a source that `explain_input` shows, without reading."""

import dataclasses
import enum
from collections.abc import Mapping

from keras_strategies.data.options import AutoShardPolicy


class Reading(enum.Enum):
    """What each process reads of rows that are not its own, in words.

    Attributes:
      ROWS: Its rows and no others.
      PIPELINE: All rows, of which it keeps its own.
      REPLICAS: Batches of each of its replicas.
    """

    ROWS = "each process reads its own rows of each batch only"
    PIPELINE = "each process runs the whole pipeline and keeps its own rows"
    REPLICAS = "each replica takes whole batches from its process's dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a source says of itself without reading.

    Attributes:
      applied: The policy that several processes follow.
      reason: Why, as the end of a sentence: "because ...".
      asked: The policy that the dataset or the user chose, where the source
        knows. Then `applied` and `reason` hold for one process, too.
      reading: What each process reads.
      num_rows: Rows that the `num_batches` of an epoch are made of, if known.
      first_rows: Rows of the first batch, if known; others may differ.
      files: The files of processes, as far as they are known here.
      notes: What else to know, in sentences.
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
