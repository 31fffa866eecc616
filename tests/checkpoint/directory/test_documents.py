"""Documents of checkpoints that somebody else may have written."""

import json
import random

import pytest

from keras_strategies.checkpoint.directory import documents
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.names import RUN

GOOD = {
    "version": 1,
    "variables": {"weights": {"dense.kernel": [[2, 3], "float32"]}},
    "state": {"epoch": 0, "best": float("inf")},
}


def write(directory, text):
    (directory / RUN).parent.mkdir(exist_ok=True)
    (directory / RUN).write_bytes(text)
    return directory


def test_a_document_is_read(tmp_path):
    write(tmp_path, json.dumps(GOOD).encode())
    assert documents.read_document(tmp_path) == GOOD


def test_of_another_version_only_that_is_known(tmp_path):
    write(tmp_path, b'{"version": 7}')
    assert documents.read_document(tmp_path) == {"version": 7}


def changed(**entries):
    return json.dumps(GOOD | entries).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "not a valid document: Expecting value"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff", "not a valid document"),
        (b'{"version": 1, "version": 1}', "the key 'version' twice"),
        (b"[]", "not a JSON object"),
        (b"{}", "no version"),
        (b'{"version": 1}', "its entries"),
        (changed(variables=[]), "its entries"),
        (changed(variables={"a": []}), "its entries"),
        (changed(variables={"a": {"b": [3, "float32"]}}), "its entries"),
        (changed(variables={"a": {"b": [[-1], "int8"]}}), "its entries"),
        (changed(variables={"a": {"b": [[1], 3]}}), "its entries"),
        (changed(variables={"a": {"b": [[1]]}}), "its entries"),
    ],
    ids=lambda value: str(value[:30]),
)
def test_what_is_no_document_is_damage(tmp_path, text, problem):
    write(tmp_path, text)
    with pytest.raises(DamagedCheckpoint, match=problem):
        documents.read_document(tmp_path)


def test_a_document_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_BYTES", 100)
    write(tmp_path, json.dumps(GOOD).encode() + b" " * 100)
    with pytest.raises(DamagedCheckpoint, match="maximum of 100"):
        documents.read_document(tmp_path)


def test_a_link_and_nothing_are_no_documents(tmp_path):
    with pytest.raises(DamagedCheckpoint, match="run/metadata"):
        documents.read_document(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(GOOD))
    write(tmp_path, b"")
    (tmp_path / RUN).unlink()
    (tmp_path / RUN).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint):
        documents.read_document(tmp_path)


@pytest.mark.slow
def test_ten_thousand_damaged_documents_are_damage_or_documents(
    tmp_path, monkeypatch
):
    draw = random.Random(0)
    good = json.dumps(GOOD)
    pieces = ["", "[", "{", '"', ":", ",", "-1", "1e999", "null", "variables"]
    for _ in range(10_000):
        text = good
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text) + 1)
            stop = min(start + draw.randint(0, 9), len(text))
            text = text[:start] + draw.choice(pieces) + text[stop:]
        write(tmp_path, text.encode())
        try:
            document = documents.read_document(tmp_path)
        except DamagedCheckpoint:
            continue
        assert document["version"] != 1 or "state" in document
