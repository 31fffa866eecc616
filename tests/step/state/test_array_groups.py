"""The state that Keras sees has sums in place of stacked accumulators."""

from keras_strategies.step.state.array_groups import ArrayGroup


class Sums:
    """Of which the second of three variables is an accumulator."""

    count, places = 0, {2: [1]}

    def convert(self, state, *, is_packed):
        assert not is_packed
        self.count += 1
        state[2][1] = sum(state[2][1])


def test_entries_and_slices_are_sums_that_are_computed_once():
    sums = Sums()
    group = ArrayGroup([1, [2, 3], 4], sums, 2)
    assert group[:2] == [1, 5]
    assert group[::-1] == [4, 5, 1]
    assert list(group) == [1, 5, 4]
    assert (group[-2], len(group), sums.count) == (5, 3, 1)
    assert group.arrays == [1, 5, 4]


class Stacks:
    """Of which the first two of three variables are slices."""

    count, places = 0, {2: [0, 1]}

    def convert(self, state, *, is_packed):
        assert not is_packed
        self.count += 1
        state[2][:2] = state[2][0]


def test_stacks_are_divided_when_one_of_their_entries_is_read():
    stacks = Stacks()
    group = ArrayGroup([[1, 2], None, 3], stacks, 2)
    assert (group[2], group[-1], stacks.count) == (3, 3, 0)
    assert group.arrays == [[1, 2], None, 3]
    assert (group[-2], group[0], list(group)) == (2, 1, [1, 2, 3])
    assert (group.arrays, stacks.count) == ([1, 2, 3], 1)
