"""grain's datasets and loaders as sources."""

import functools
import itertools
import warnings

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.data.grain.grain_data import (
    GrainSource,
    _loses_remainders,
)
from keras_strategies.data.options import AutoShardPolicy
from tests.support.combinations import combine
from tests.support.parts import (
    BATCHES,
    ROWS,
    WORKERS,
    cut_rows,
    cut_up,
    ids,
    make_sources,
    read_joined,
    read_parts,
)

grain = pytest.importorskip("grain")
absl_flags = pytest.importorskip("absl.flags")


class Counted:
    """A random-access source of pairs that counts what is read of it."""

    def __init__(self, rows):
        self.rows = rows
        self.read = []

    def __len__(self):
        return self.rows

    def __repr__(self):
        return f"Counted({self.rows})"

    def __getitem__(self, index):
        self.read.append(int(index))
        return np.full(2, index, "float32"), np.int32(index)


class Double(grain.transforms.Map):
    def map(self, element):
        return element * 2


def pairs(rows):
    return grain.MapDataset.source(Counted(rows))


def sharded(rows, index=0, count=3, *, epochs=1, drop_remainder=False):
    """A loader of a shard of some rows, in batches of two."""
    options = grain.sharding.ShardOptions(index, count, drop_remainder)
    return grain.DataLoader(
        data_source=Counted(rows),
        sampler=grain.samplers.IndexSampler(
            rows, shard_options=options, num_epochs=epochs
        ),
        operations=[grain.transforms.Batch(2)],
    )


def rows_in(shards):
    return sum(len(labels) for loader in shards for _, labels in loader)


@pytest.mark.parametrize(
    "policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.OFF]
)
def test_rows_that_a_loader_loses_are_reported(policy):
    """Of grain 0.2.18; nothing is said where a later one reads all rows."""
    read = rows_in(sharded(11, index) for index in range(3))
    loses = read < 11
    assert loses == (_loses_remainders() is True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GrainSource(
            sharded(11, 1), num_processes=3, process_index=1, policy=policy
        )
    told = [str(w.message) for w in caught]
    if loses:
        assert [t for t in told if f"so {11 - read} of the rows are lost" in t]
    else:
        assert told == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: sharded(12, 1),
        lambda: sharded(11, 1, epochs=3),
        lambda: sharded(11, 1, epochs=None),
        lambda: sharded(11, 1, drop_remainder=True),
        lambda: sharded(11, 0, 1),
        lambda: pairs(11).batch(2),
    ],
    ids=["even", "even epochs", "infinite", "dropped", "one", "map"],
)
def test_loaders_that_lose_nothing_are_quiet(make):
    source = make()
    is_one = getattr(source, "_shard_options", None) is None
    count = 1 if is_one or source._shard_options.shard_count == 1 else 3
    GrainSource(source, num_processes=count, process_index=min(1, count - 1))


def test_a_distributed_loader_tells_of_lost_rows_once():
    strategy = ks.get_strategy()
    if not _loses_remainders():
        pytest.skip("this grain reads all rows")
    with pytest.warns(UserWarning, match="of the rows are lost"):
        strategy.experimental_distribute_dataset(sharded(11))


sources = functools.partial(make_sources, GrainSource)
joined = functools.partial(read_joined, GrainSource)


def from_map(rows, batch):
    return pairs(rows).batch(batch)


def from_mapped_batches(rows, batch):
    return pairs(rows).batch(batch).map(lambda element: element)


def iterate(rows, batch):
    return pairs(rows).to_iter_dataset().batch(batch)


def from_loader(rows, batch):
    return grain.DataLoader(
        data_source=Counted(rows),
        sampler=grain.samplers.SequentialSampler(rows),
        operations=[grain.transforms.Batch(batch)],
        shard_options=grain.sharding.NoSharding(),
    )


FORMS = [from_map, from_mapped_batches, iterate, from_loader]


@pytest.mark.parametrize(("rows", "form"), combine(ROWS, FORMS, every=3))
def test_every_row_is_used_once_in_its_batch(form, rows):
    if rows == 0 and form is from_loader:
        pytest.skip("grain has no sampler of no rows")
    for batch, workers in itertools.product(BATCHES, WORKERS):
        assert joined(form(rows, batch), workers) == cut_up(rows, batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_off_gives_every_row_to_every_worker(form, rows):
    for source in sources(form(rows, 4), 3, policy=AutoShardPolicy.OFF):
        assert source.is_process_local
        assert source.batch_size in (4, rows)
        assert source.num_batches is None
        assert ids(read_parts(source, 0, 3)) == cut_up(rows, 4)


def test_size_and_length_are_known():
    source = GrainSource(from_map(13, 4))
    assert (source.batch_size, source.num_batches) == (4, 4)
    assert not source.is_process_local
    source = GrainSource(pairs(13).batch(4, drop_remainder=True))
    assert (source.batch_size, source.num_batches) == (4, 3)
    source = GrainSource(from_mapped_batches(13, 4))
    assert (source.batch_size, source.num_batches) == (4, 4)
    for form in (iterate, from_loader):
        source = GrainSource(form(13, 4))
        assert (source.batch_size, source.num_batches) == (4, None)
    assert GrainSource(from_map(0, 4)).num_batches == 0


def test_batches_read_whole_are_marked_for_comparison():
    for form in FORMS[1:]:
        checksums = [
            [part.checksum for part in read_parts(source, worker, 2)]
            for worker, source in enumerate(sources(form(8, 4), 2))
        ]
        assert checksums[0] == checksums[1]
        assert len(set(checksums[0])) == 2


def test_worker_reads_its_own_rows_only():
    for worker in range(3):
        data = Counted(25)
        source = GrainSource(
            grain.MapDataset.source(data).batch(4),
            num_processes=3,
            process_index=worker,
        )
        wanted = sum(ids(read_parts(source, worker, 3)), [])
        # Without rows in the last batch, it reads one for its shape.
        assert sorted({*data.read, 24}) == sorted({*wanted, 24})
        assert len(wanted) < 14


def test_worker_without_rows_reads_one_of_each_batch():
    data = Counted(20)
    source = GrainSource(grain.MapDataset.source(data).batch(1))
    parts = list(source.read(0, 0, lambda rows: (rows, rows)))
    assert len(parts) == 20
    assert ids(parts) == [[]] * 20
    assert sorted(data.read) == list(range(20))


def test_dropped_remainder():
    dataset = pairs(13).batch(4, drop_remainder=True)
    assert joined(dataset, 3) == cut_up(12, 4)


def test_shuffle_is_grains_and_anew_in_each_epoch():
    dataset = pairs(13).shuffle(seed=3).batch(4)
    repeated = [
        batch[1].tolist() for batch in pairs(13).shuffle(3).batch(4).repeat(3)
    ]
    for epoch, workers in itertools.product(range(3), WORKERS):
        got = joined(dataset, workers, epoch)
        assert got == repeated[4 * epoch : 4 * epoch + 4]
    assert repeated[:4] != repeated[4:8]


def test_infinite_dataset_goes_on_over_its_epochs():
    dataset = pairs(5).shuffle(seed=3).repeat().batch(4)
    source = GrainSource(dataset)
    assert source.num_batches is None
    read = source.read(0, 0, cut_rows(0, 1))
    seen = ids([next(read) for _ in range(10)])
    read.close()
    assert sorted(sum(seen, [])) == sorted(list(range(5)) * 8)
    later = source.read(1, 7, cut_rows(0, 1))
    assert ids([next(later) for _ in range(3)]) == seen[7:]
    later.close()


def test_an_infinite_dataset_needs_a_number_of_steps():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.MirroredStrategy(devices=jax.devices()[:2]).scope():
        model = keras.models.clone_model(model)
        model.compile("sgd", "mse")
    x, y = np.ones((8, 1)), np.ones((8, 1))
    data = grain.MapDataset.source(list(zip(x, y, strict=True)))
    for infinite in (data.repeat().batch(4), data.batch(4).repeat()):
        with pytest.raises(
            ValueError, match="needs a number of steps.*steps_per_epoch"
        ):
            model.fit(infinite, shuffle=False, verbose=0)
        model.fit(
            infinite, steps_per_epoch=3, epochs=2, shuffle=False, verbose=0
        )
        assert int(model.optimizer.iterations) in (6, 12)


@pytest.mark.parametrize("form", combine(FORMS, every=2))
def test_resumes_on_any_number_of_workers(form):
    for workers, start in itertools.product(WORKERS, range(5)):
        got = joined(form(13, 4), workers, 0, start)
        assert got == cut_up(13, 4)[start:]


def test_shuffled_dataset_resumes_in_a_later_epoch():
    dataset = pairs(13).shuffle(seed=3).batch(4)
    whole = joined(dataset, 2, epoch=2)
    assert joined(dataset, 3, epoch=2, start=2) == whole[2:]


@pytest.mark.parametrize("form", [iterate, from_loader])
def test_iterator_goes_on_from_its_state(form):
    data = Counted(64)
    source = GrainSource(
        grain.MapDataset.source(data)
        .to_iter_dataset(grain.ReadOptions(0, 0))
        .batch(4)
        if form is iterate
        else form(64, 4)
    )
    read = source.read(0, 0, cut_rows(0, 1))
    for _ in range(6):
        next(read)
    read.close()
    got = ids(read_parts(source, 0, 1, start=5))
    assert got == cut_up(64, 4)[5:]


def test_window_shuffled_iterator_resumes():
    dataset = grain.experimental.WindowShuffleIterDataset(
        pairs(20).to_iter_dataset(), window_size=6, seed=1
    ).batch(4)
    source = GrainSource(dataset)
    whole = ids(read_parts(source, 0, 1))
    assert whole != cut_up(20, 4)
    for start in (1, 3):
        assert ids(read_parts(source, 0, 1, start=start)) == whole[start:]
        assert joined(dataset, 3, start=start) == whole[start:]


def test_iterator_epochs_are_alike():
    source = GrainSource(iterate(13, 4))
    for epoch in range(3):
        assert ids(read_parts(source, 0, 1, epoch)) == cut_up(13, 4)


def test_reads_may_overlap_and_be_left():
    source = GrainSource(iterate(13, 4))
    first = source.read(0, 0, cut_rows(0, 1))
    next(first)
    second = source.read(0, 0, cut_rows(0, 1))
    assert ids(list(second)) == cut_up(13, 4)
    assert ids(list(first)) == cut_up(13, 4)[1:]


def test_own_batch_function_sees_whole_batches():
    def padded(rows):
        return grain.experimental.batch_and_pad(rows, batch_size=4)

    dataset = grain.MapDataset.range(1, 8).batch(4, batch_fn=padded)
    read = [
        read_parts(source, worker, 2)
        for worker, source in enumerate(sources(dataset, 2))
    ]
    batches = [
        np.concatenate([part.data for part in worker_parts]).tolist()
        for worker_parts in zip(*read, strict=True)
    ]
    assert batches == [[1, 2, 3, 4], [5, 6, 7, 0]]


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA])
def test_loader_divided_by_grain_is_left_alone(policy):
    seen = []
    for worker in range(2):
        loader = grain.DataLoader(
            data_source=Counted(12),
            sampler=grain.samplers.IndexSampler(12, num_epochs=1),
            operations=[grain.transforms.Batch(3)],
            shard_options=grain.sharding.ShardOptions(worker, 2),
        )
        source = GrainSource(
            loader, num_processes=2, process_index=worker, policy=policy
        )
        assert source.is_process_local
        assert source.batch_size == 6
        assert source.num_batches is None
        seen += ids(read_parts(source, worker, 2))
    assert sorted(sum(seen, [])) == list(range(12))


def test_foreign_shards_are_refused():
    loader = grain.DataLoader(
        data_source=Counted(12),
        sampler=grain.samplers.IndexSampler(12, num_epochs=1),
        operations=[grain.transforms.Batch(3)],
        shard_options=grain.sharding.ShardOptions(1, 4),
    )
    with pytest.raises(ValueError, match="shard_index=1, shard_count=4"):
        GrainSource(loader, num_processes=2, process_index=1)
    assert GrainSource(
        loader, num_processes=2, process_index=1, policy=AutoShardPolicy.OFF
    ).is_process_local
    assert not GrainSource(loader).is_process_local


def test_dataset_sliced_by_process_is_warned_of():
    dataset = pairs(12)[1::2].batch(3)
    with pytest.warns(UserWarning, match=r"\[1::2\] in process 1 of 2"):
        GrainSource(dataset, num_processes=2, process_index=1)
    GrainSource(
        dataset, num_processes=2, process_index=1, policy=AutoShardPolicy.OFF
    )


def test_dataset_without_batches_is_refused():
    with pytest.raises(ValueError, match=r"batch\(global_batch_size\)"):
        GrainSource(grain.MapDataset.range(4))
    with pytest.raises(ValueError, match=r"batch\(global_batch_size\)"):
        GrainSource(pairs(4).to_iter_dataset())


def test_gaps_are_refused():
    dataset = from_mapped_batches(8, 2).filter(lambda batch: batch[1][0] != 2)
    source = GrainSource(dataset)
    with pytest.raises(ValueError, match="None at index 1"):
        read_parts(source, 0, 1)
    assert joined(dataset.to_iter_dataset(), 2) == [[0, 1], [4, 5], [6, 7]]


def test_rows_of_different_shape_are_refused():
    rows = [np.zeros(2), np.zeros(3)]
    source = GrainSource(grain.MapDataset.source(rows).batch(2))
    with pytest.raises(ValueError, match=r"the shapes \[\(2,\), \(3,\)\]"):
        read_parts(source, 0, 1)


def test_error_of_the_pipeline_comes_at_its_batch():
    def checked(element):
        if element[1] == 9:
            raise OSError("row 9 is lost")
        return element

    source = GrainSource(pairs(13).map(checked).batch(4))
    read = source.read(0, 0, cut_rows(0, 1))
    assert ids([next(read), next(read)]) == cut_up(8, 4)
    with pytest.raises(OSError, match="row 9 is lost"):
        next(read)


def test_list_at_the_top_becomes_a_tuple():
    dataset = grain.MapDataset.range(4).map(lambda i: [i, i + 1]).batch(2)
    for part in read_parts(GrainSource(dataset), 0, 1):
        assert type(part.data) is tuple


def test_other_seeds_have_other_marks():
    checksums = {
        next(GrainSource(d).read(0, 0, cut_rows(0, 1))).checksum
        for d in (pairs(8).shuffle(seed).batch(4) for seed in (1, 2, 1))
    }
    assert len(checksums) == 2


@pytest.mark.slow
def test_worker_processes_of_a_loader():
    # grain's worker processes read absl's flags.
    absl_flags.FLAGS.mark_as_parsed()
    loader = grain.DataLoader(
        data_source=np.arange(10),
        sampler=grain.samplers.SequentialSampler(10),
        operations=[Double(), grain.transforms.Batch(4)],
        worker_count=1,
        shard_options=grain.sharding.NoSharding(),
    )
    source = GrainSource(loader)
    parts = list(source.read(0, 0, cut_rows(1, 2)))
    got = [part.data.tolist() for part in parts]
    assert got == [[4, 6], [12, 14], [18]]
