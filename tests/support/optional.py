"""Which packages that tests can do without are installed."""

import importlib.util

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None


def without_torch(sources):
    """Sources by name, or names; without torch's where it is not installed."""
    left = [name for name in sources if HAS_TORCH or name != "torch"]
    if isinstance(sources, dict):
        return {name: sources[name] for name in left}
    return left
