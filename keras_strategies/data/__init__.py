"""Datasets whose batches are divided over the replicas."""

from keras_strategies.data.file_source import Files as Files
from keras_strategies.data.file_source import files as files
from keras_strategies.data.options import SHARD_HINT as SHARD_HINT
from keras_strategies.data.options import (
    AutoShardPolicy as AutoShardPolicy,
)
from keras_strategies.data.options import (
    DistributeOptions as DistributeOptions,
)
