"""What a process reports to its launcher, and what the launcher reads."""

import os

import pytest

from keras_strategies.job import progress_pipe
from keras_strategies.job.progress_pipe import (
    PROGRESS_PIPE,
    Progress,
    ProgressReader,
)


@pytest.fixture
def fresh():
    """This process has not looked for the pipe yet."""
    for function in (progress_pipe._find_pipe, progress_pipe.report_training):
        function.cache_clear()
    yield
    for function in (progress_pipe._find_pipe, progress_pipe.report_training):
        function.cache_clear()


@pytest.fixture
def reader():
    found = ProgressReader(Progress())
    yield found
    os.close(found.fd)
    found.close()


def test_reports_are_read_and_the_variable_is_taken(fresh, reader, monkeypatch):
    monkeypatch.setenv(PROGRESS_PIPE, reader.variable)
    progress_pipe.report_training()
    progress_pipe.report_training()
    progress_pipe.report("directory")
    progress_pipe.report("checkpoint", 4)
    for step in (5, 7, 6):
        progress_pipe.report("step", step)
    reader.read()
    assert PROGRESS_PIPE not in os.environ
    assert reader._progress == Progress(
        has_trained=True, has_directory=True, step=7, checkpoint=4
    )
    assert not os.get_inheritable(reader.fd)


@pytest.mark.parametrize(
    "variable",
    ["", "x", "1", ":", "0:0", "-1:1", "9" * 30 + ":1", "99999:5", "1:x"],
)
def test_a_wrong_variable_reports_nothing(fresh, monkeypatch, variable):
    monkeypatch.setenv(PROGRESS_PIPE, variable)
    assert progress_pipe._find_pipe() is None
    progress_pipe.report("step", 1)


def test_a_descriptor_of_another_file_is_not_written_to(
    fresh, reader, monkeypatch, tmp_path
):
    inode = reader.variable.partition(":")[2]
    with open(tmp_path / "file", "wb") as file:
        monkeypatch.setenv(PROGRESS_PIPE, f"{file.fileno()}:{inode}")
        progress_pipe.report("step", 1)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"step\nstep -1\nstep 1e9\nstep " + b"9" * 19 + b"\nother 3\n",
        b"step 1 2\n\n\nSTEP 3\nstep\xff 3\n",
        b"x" * 60000,
    ],
)
def test_other_bytes_are_ignored(reader, data):
    os.write(reader.fd, data)
    reader.read()
    assert reader._progress == Progress()
    os.write(reader.fd, b"\nstep 3\n")
    reader.read()
    assert reader._progress.step == 3
    assert len(reader._rest) <= 1 << 16


def test_parts_of_a_line_are_joined(reader):
    for part in (b"st", b"ep 1", b"2\nstep"):
        os.write(reader.fd, part)
        reader.read()
    assert reader._progress.step == 12


def test_a_full_pipe_loses_reports_and_blocks_nobody(
    fresh, reader, monkeypatch
):
    monkeypatch.setenv(PROGRESS_PIPE, reader.variable)
    for step in range(20000):
        progress_pipe.report("step", step)
    reader.read()
    assert 0 < reader._progress.step < 20000
