"""Helpers for tests of distributed training."""

from keras_strategies.testing.processes import (
    ProcessResult as ProcessResult,
)
from keras_strategies.testing.processes import (
    run_processes as run_processes,
)
from keras_strategies.testing.replicated import (
    assert_replicated as assert_replicated,
)
