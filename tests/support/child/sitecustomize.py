"""Runs first in the child processes of tests: they start faster, and no test
has to say so. `WITHOUT_PACKAGES` of tests/support/commands.py says more."""

import gc
import os
import sys

# In pytest's own processes tests/conftest.py does it.
gc.set_threshold(50_000, 20, 20)
for name in os.environ.get("KERAS_STRATEGIES_TESTS_WITHOUT", "").split():
    sys.modules[name] = None
