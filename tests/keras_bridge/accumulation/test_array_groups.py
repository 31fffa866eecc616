"""The state that Keras sees has sums in place of stacked accumulators."""

from keras_strategies.keras_bridge.accumulation.array_groups import ArrayGroup


class Sums:
    """Of which the second of three variables is an accumulator."""

    count = 0

    def find_sums(self, group):
        self.count += 1
        return [None, sum(group[1]), None]


def test_entries_and_slices_are_sums_that_are_computed_once():
    sums = Sums()
    group = ArrayGroup([1, [2, 3], 4], sums)
    assert group[:2] == [1, 5]
    assert group[::-1] == [4, 5, 1]
    assert list(group) == [1, 5, 4]
    assert (group[-2], len(group), sums.count) == (5, 3, 1)
    assert group.arrays == [1, [2, 3], 4]
