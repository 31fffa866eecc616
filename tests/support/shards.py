"""Parts of the tests, which machines of continuous integration run at once."""

import collections


def choose(nodes, shard, find_scope):
    """The tests of a part.

    Args:
      nodes: The ids of all tests.
      shard: The part's number and the number of parts: "1/3", "2/3" or "3/3".
      find_scope: A function that returns the scope of a test. All tests of a
        scope are in the same part.

    Returns:
      A set of ids. Each test is in exactly one part.

    Raises:
      ValueError: if `shard` is no such text.
    """
    index, _, count = shard.partition("/")
    index, count = int(index), int(count)
    if not 1 <= index <= count:
        raise ValueError(f"--shard must be 1/N to N/N. Received: {shard}.")
    scopes = collections.Counter(map(find_scope, nodes))
    sizes = [0] * count
    parts = {}
    # The largest scopes first, each into the part that is smallest so far.
    for scope, size in sorted(scopes.items(), key=lambda x: (-x[1], x[0])):
        parts[scope] = sizes.index(min(sizes))
        sizes[parts[scope]] += size
    return {node for node in nodes if parts[find_scope(node)] == index - 1}
