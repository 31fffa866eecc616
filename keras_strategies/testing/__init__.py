"""Helpers for tests of distributed training."""

from keras_strategies.testing.replicated import (
    assert_replicated as assert_replicated,
)
