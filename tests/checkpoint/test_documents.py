"""Documents of checkpoints that somebody else may have written."""

import json

import pytest

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.names import MANIFEST, RUN

GOOD = {
    "version": 1,
    "variables": {"weights": {"dense.kernel": [[2, 3], "float32"]}},
    "state": {"epoch": 0, "best": float("inf")},
}


def write(directory, text):
    (directory / RUN).parent.mkdir(exist_ok=True)
    (directory / RUN).write_bytes(text)
    (directory / MANIFEST).touch()
    return directory


def test_a_document_is_read(tmp_path):
    write(tmp_path, json.dumps(GOOD).encode())
    assert contents.load_document(tmp_path) == GOOD


def test_a_document_of_another_version_is_not_damage(tmp_path):
    write(tmp_path, b'{"version": 7}')
    with pytest.raises(ValueError, match="with format 7") as caught:
        contents.load_document(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpoint)


def changed(**entries):
    return json.dumps(GOOD | entries).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "not a valid document: Expecting value"),
        (b"\xff", "not a valid document"),
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
        contents.load_document(tmp_path)


def test_a_document_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "MAX_BYTES", 100)
    write(tmp_path, json.dumps(GOOD).encode() + b" " * 100)
    with pytest.raises(DamagedCheckpoint, match="maximum of 100"):
        contents.load_document(tmp_path)


def test_a_link_and_nothing_are_no_documents(tmp_path):
    (tmp_path / MANIFEST).touch()
    with pytest.raises(DamagedCheckpoint, match="run/metadata"):
        contents.load_document(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(GOOD))
    write(tmp_path, b"")
    (tmp_path / RUN).unlink()
    (tmp_path / RUN).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint):
        contents.load_document(tmp_path)
