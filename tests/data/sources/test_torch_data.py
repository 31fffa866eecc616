"""torch's datasets and loaders as sources."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.sources.torch_data import TorchSource, is_torch
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


class Counted(torch_data.Dataset):
    """Pairs; counts what is read."""

    def __init__(self, rows):
        self.rows = rows
        self.read = []

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((2,), float(index)), index


class Streamed(torch_data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for index in range(self.rows):
            yield torch.full((2,), float(index)), index


class Backwards(torch_data.Sampler):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows - 1, -1, -1))

    def __len__(self):
        return self.rows


class Drawn(torch_data.Sampler):
    """Draws from torch's global generator, as many own samplers do."""

    def __iter__(self):
        return iter(torch.randperm(13).tolist())


class OwnLoader(torch_data.DataLoader):
    pass


def tensors(rows):
    x = torch.arange(rows).float()[:, None].repeat(1, 2)
    return torch_data.TensorDataset(x, torch.arange(rows))


sources = functools.partial(make_sources, TorchSource)
joined = functools.partial(read_joined, TorchSource)


def own_collate(rows):
    return torch_data.default_collate(rows)


def loader(dataset, batch, **options):
    return torch_data.DataLoader(dataset, batch_size=batch, **options)


FORMS = {
    "loader": lambda rows, batch: loader(Counted(rows), batch),
    "tensors": lambda rows, batch: loader(tensors(rows), batch),
    "own_collate": lambda rows, batch: loader(
        Counted(rows), batch, collate_fn=own_collate
    ),
    "batch_sampler": lambda rows, batch: torch_data.DataLoader(
        Counted(rows),
        batch_sampler=torch_data.BatchSampler(range(rows), batch, False),
    ),
    "lists": lambda rows, batch: torch_data.DataLoader(
        Counted(rows), batch_sampler=cut_up(rows, batch)
    ),
    "iterable": lambda rows, batch: loader(Streamed(rows), batch),
    "own_loader": lambda rows, batch: OwnLoader(
        Counted(rows), batch_size=batch
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_is_used_once_in_its_batch(form, rows):
    for batch, workers in itertools.product(BATCHES, WORKERS):
        data = FORMS[form](rows, batch)
        assert joined(data, workers) == cut_up(rows, batch)


@pytest.mark.parametrize("rows", ROWS)
def test_datasets_without_a_loader(rows):
    for batch, workers in itertools.product(BATCHES, WORKERS):
        for data in (Counted(rows), tensors(rows), Streamed(rows)):
            got = joined(data, workers, batch_size=batch)
            assert got == cut_up(rows, batch)


@pytest.mark.parametrize("form", FORMS)
def test_off_gives_every_row_to_every_worker(form):
    data = FORMS[form](13, 4)
    for source in sources(data, 3, policy=AutoShardPolicy.OFF):
        assert source.is_process_local
        assert source.num_batches is None
        assert ids(read_parts(source, 0, 3)) == cut_up(13, 4)


def test_size_and_length_are_known():
    known = TorchSource(loader(Counted(13), 4))
    assert (known.batch_size, known.num_batches) == (4, 4)
    dropping = TorchSource(loader(Counted(13), 4, drop_last=True))
    assert (dropping.batch_size, dropping.num_batches) == (4, 3)
    stream = TorchSource(loader(Streamed(13), 4))
    assert (stream.batch_size, stream.num_batches) == (4, None)
    whole = TorchSource(torch_data.DataLoader(Counted(13), batch_size=None))
    assert (whole.batch_size, whole.num_batches) == (None, 13)
    lists = TorchSource(FORMS["lists"](13, 4))
    assert (lists.batch_size, lists.num_batches) == (None, 4)
    assert TorchSource(Counted(0), batch_size=4).num_batches == 0
    assert TorchSource(Counted(99)).batch_size == 32


@pytest.mark.parametrize("shuffle", [False, True])
def test_worker_reads_its_own_rows_only(shuffle):
    for worker in range(3):
        data = Counted(13)
        source = TorchSource(
            loader(data, 4, shuffle=shuffle),
            num_processes=3,
            process_index=worker,
        )
        wanted = sum(ids(read_parts(source, worker, 3)), [])
        # Without rows in the last batch, it reads one for its shape.
        assert data.read[: len(wanted)] == wanted
        assert len(data.read) <= len(wanted) + 1
        assert len(wanted) < 8


def test_worker_without_rows_reads_one_of_each_batch():
    data = Counted(20)
    source = TorchSource(loader(data, 1))
    parts = list(source.read(0, 0, lambda rows: (rows, rows)))
    assert len(parts) == 20
    assert ids(parts) == [[]] * 20
    assert data.read == list(range(20))


def test_dropped_remainder():
    for shuffle in (False, True):
        data = loader(Counted(13), 4, drop_last=True, shuffle=shuffle)
        got = joined(data, 3)
        assert list(map(len, got)) == [4, 4, 4]
        assert len(set(sum(got, []))) == 12


SHUFFLED = {
    "shuffle": lambda: loader(Counted(13), 4, shuffle=True),
    "tensors": lambda: loader(tensors(13), 4, shuffle=True),
    "own_collate": lambda: loader(
        Counted(13), 4, shuffle=True, collate_fn=own_collate
    ),
    "fewer": lambda: loader(
        Counted(20),
        4,
        sampler=torch_data.RandomSampler(range(20), num_samples=13),
    ),
    "subset": lambda: loader(
        Counted(20), 4, sampler=torch_data.SubsetRandomSampler(range(5, 18))
    ),
    "global_generator": lambda: loader(Counted(13), 4, sampler=Drawn()),
    "own_loader": lambda: OwnLoader(Counted(13), batch_size=4, shuffle=True),
    "own_loader_generator": lambda: OwnLoader(
        Counted(13),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
    ),
}
REPLACED = {
    "replacement": lambda: loader(
        Counted(20),
        4,
        sampler=torch_data.RandomSampler(
            range(20), replacement=True, num_samples=13
        ),
    ),
    "weighted": lambda: loader(
        Counted(20), 4, sampler=torch_data.WeightedRandomSampler([1.0] * 20, 13)
    ),
}


@pytest.mark.parametrize("form", SHUFFLED | REPLACED)
def test_random_order_is_the_same_everywhere_and_anew_each_epoch(form):
    make = (SHUFFLED | REPLACED)[form]
    orders = []
    for epoch in range(3):
        torch.manual_seed(epoch)
        whole = joined(make(), 1, epoch, seed=3)
        assert list(map(len, whole)) == [4, 4, 4, 1]
        for workers in WORKERS[1:]:
            assert joined(make(), workers, epoch, seed=3) == whole
        for start in (1, 3):
            assert joined(make(), 3, epoch, start, seed=3) == whole[start:]
        orders.append(sum(whole, []))
        if form in SHUFFLED:
            assert len(set(orders[-1])) == 13
    assert orders[0] != orders[1] != orders[2] != orders[0]
    if form != "own_loader_generator":
        assert sum(joined(make(), 2, 0, seed=4), []) != orders[0]


def test_generator_of_the_loader_decides():
    def order(number, **options):
        generator = torch.Generator().manual_seed(number)
        data = loader(Counted(13), 4, shuffle=True, generator=generator)
        return joined(data, 2, **options)

    assert order(1, seed=3) == order(1, seed=4)
    assert order(1) != order(2)


def test_shuffle_of_a_dataset_without_a_loader():
    orders = [
        joined(Counted(13), 2, epoch, batch_size=4, shuffle=True)
        for epoch in range(2)
    ]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(sum(order, [])) == list(range(13))


@pytest.mark.parametrize("form", FORMS)
def test_resumes_on_any_number_of_workers(form):
    for workers, start in itertools.product(WORKERS, range(5)):
        got = joined(FORMS[form](13, 4), workers, 0, start)
        assert got == cut_up(13, 4)[start:]


def test_resuming_reads_no_earlier_row():
    data = Counted(13)
    source = TorchSource(loader(data, 4))
    assert ids(read_parts(source, 0, 1, start=2)) == cut_up(13, 4)[2:]
    assert min(data.read) == 8


def test_torchs_global_generator_is_put_back():
    class Noisy(Counted):
        def __getitem__(self, index):
            return torch.full((2,), float(index)), torch.rand(())

    def noise(start=0):
        source = TorchSource(loader(Noisy(12), 4))
        return [part.data[1] for part in source.read(0, start, cut_rows(0, 1))]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    whole = noise()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    np.testing.assert_array_equal(noise(1), whole[1:])
    assert len(np.unique(np.concatenate(whole))) == 12


def test_set_epoch_is_called():
    class Epochs(Counted):
        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Epochs(4)
    source = TorchSource(loader(data, 4))
    read_parts(source, 0, 1, epoch=6)
    assert data.epoch == 6


def test_padding_collate_sees_whole_batches():
    def padded(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    rows = [torch.arange(1.0, n + 1) for n in (3, 1, 2, 1)]
    data = loader(rows, 2, collate_fn=padded)
    shapes = [
        [part.data.shape for part in read_parts(source, worker, 2)]
        for worker, source in enumerate(sources(data, 2))
    ]
    assert shapes == [[(1, 3), (1, 2)]] * 2


def test_collate_that_drops_rows():
    def kept(rows):
        return torch_data.default_collate([r for r in rows if r[1] % 3])

    data = loader(Counted(8), 4, collate_fn=kept)
    assert joined(data, 2) == [[1, 2], [4, 5, 7]]


def test_dataset_of_batches():
    batches = torch_data.TensorDataset(
        torch.arange(12.0).reshape(3, 4, 1), torch.arange(12).reshape(3, 4)
    )
    data = torch_data.DataLoader(batches, batch_size=None)
    read = [
        [part.data[1].tolist() for part in read_parts(source, worker, 2)]
        for worker, source in enumerate(sources(data, 2))
    ]
    assert read == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_own_sampler():
    data = loader(Counted(9), 4, sampler=Backwards(9))
    assert joined(data, 2) == [[8, 7, 6, 5], [4, 3, 2, 1], [0]]
    assert TorchSource(data).num_batches == 3
    assert TorchSource(loader(Counted(13), 4, sampler=Drawn())).batch_size == 4


def test_samplers_that_disagree_have_other_marks():
    def checksum(rows):
        data = loader(Counted(9), 4, sampler=rows)
        source = TorchSource(data, num_processes=2, process_index=0)
        return next(source.read(0, 0, cut_rows(0, 2))).checksum

    assert checksum([1, 2, 3, 4]) != checksum([4, 3, 2, 1])
    assert checksum([1, 2, 3, 4]) == checksum([1, 2, 3, 4])


def distributed(rank, count, rows=12, **options):
    dataset = Counted(rows)
    sampler = torch_data.DistributedSampler(
        dataset, num_replicas=count, rank=rank, **options
    )
    return loader(dataset, 3, sampler=sampler)


def test_distributed_sampler_is_left_alone():
    seen = []
    for epoch in range(2):
        rows = []
        for rank in range(2):
            source = TorchSource(
                distributed(rank, 2), num_processes=2, process_index=rank
            )
            assert source.is_process_local
            assert source.batch_size == 6
            assert source.num_batches is None
            rows += ids(read_parts(source, rank, 2, epoch))
        assert sorted(sum(rows, [])) == list(range(12))
        seen.append(rows)
    assert seen[0] != seen[1]


def test_distributed_sampler_must_fit():
    with pytest.raises(ValueError, match="rank=1, num_replicas=3 in process 1"):
        TorchSource(distributed(1, 3), num_processes=2, process_index=1)
    with pytest.warns(UserWarning, match="yields 1 rows twice"):
        TorchSource(
            distributed(1, 2, rows=11), num_processes=2, process_index=1
        )
    TorchSource(
        distributed(1, 2, rows=11, drop_last=True),
        num_processes=2,
        process_index=1,
    )
    off = TorchSource(
        distributed(1, 3),
        num_processes=2,
        process_index=1,
        policy=AutoShardPolicy.OFF,
    )
    assert (off.is_process_local, off.batch_size) == (True, 3)


def test_what_is_torchs():
    assert not is_torch([1, 2])
    assert is_torch(Counted(2))


def read_first(rows, **options):
    return next(
        TorchSource(loader(rows, 2, **options)).read(0, 0, cut_rows(0, 1))
    ).data


def test_nests_of_rows():
    batch = read_first([{"a": 1, "b": (2.0, np.zeros(3))}] * 2)
    assert list(batch) == ["a", "b"]
    assert batch["a"].tolist() == [1, 1]
    assert batch["b"][1].shape == (2, 3)
    assert isinstance(read_first([torch.zeros(3)] * 2), np.ndarray)


def test_tensor_that_needs_a_gradient():
    assert read_first([torch.zeros(3, requires_grad=True)] * 2).shape == (2, 3)


def test_error_of_the_dataset_comes_at_its_batch():
    class Broken(Counted):
        def __getitem__(self, index):
            if index == 9:
                raise OSError("row 9 is lost")
            return super().__getitem__(index)

    read = TorchSource(loader(Broken(13), 4)).read(0, 0, cut_rows(0, 1))
    assert ids([next(read), next(read)]) == cut_up(8, 4)
    with pytest.raises(OSError, match="row 9 is lost"):
        next(read)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes(persistent):
    workers = torch.multiprocessing.get_context("spawn")
    data = loader(
        Counted(13),
        4,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=workers,
        persistent_workers=persistent,
    )
    plain = loader(Counted(13), 4, shuffle=True)
    source = TorchSource(data, num_processes=2, process_index=1)
    for epoch in range(2):
        expected = TorchSource(plain, num_processes=2, process_index=1)
        assert ids(read_parts(source, 1, 2, epoch)) == ids(
            read_parts(expected, 1, 2, epoch)
        )
