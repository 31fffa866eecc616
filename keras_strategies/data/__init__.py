"""Datasets whose batches are sharded over the replicas."""

from keras_strategies.data.options import SHARD_HINT as SHARD_HINT
from keras_strategies.data.options import (
    AutoShardPolicy as AutoShardPolicy,
)
from keras_strategies.data.options import (
    DistributeOptions as DistributeOptions,
)
from keras_strategies.data.source import Cut as Cut
from keras_strategies.data.source import Part as Part
from keras_strategies.data.source import Source as Source
from keras_strategies.data.source import take as take
from keras_strategies.data.sources.files import Files as Files
from keras_strategies.data.sources.files import files as files
