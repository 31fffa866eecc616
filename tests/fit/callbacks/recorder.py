"""Callbacks that note what Keras calls, and files as comparable values."""

import io
import json
import pathlib
import zipfile

import h5py
import keras
import numpy as np

_INDEXED = (
    *("on_epoch_begin", "on_epoch_end", "on_train_batch_begin"),
    *("on_train_batch_end", "on_test_batch_begin", "on_test_batch_end"),
    *("on_predict_batch_begin", "on_predict_batch_end"),
)
_PLAIN = (
    *("on_train_begin", "on_train_end", "on_test_begin"),
    *("on_test_end", "on_predict_begin", "on_predict_end"),
)


class Recorder(keras.callbacks.Callback):
    """Every event: its name, its index, the keys and types of its logs."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.values = []

    def _note(self, name, index, logs):
        logs = logs or {}
        kinds = tuple((k, type(v).__name__) for k, v in logs.items())
        if "outputs" in logs:
            kinds = ("outputs",)
        self.events.append((name, index, kinds))
        self.values.append([np.asarray(v) for v in logs.values()])


def _indexed(name):
    def note(self, index, logs=None):
        self._note(name, index, logs)

    return note


def _plain(name):
    def note(self, logs=None):
        self._note(name, None, logs)

    return note


for _name in _INDEXED:
    setattr(Recorder, _name, _indexed(_name))
for _name in _PLAIN:
    setattr(Recorder, _name, _plain(_name))


def read_directory(directory):
    """The files below a directory: their names, and their numbers by name."""
    names, numbers = [], {}
    for path in sorted(pathlib.Path(directory).rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir():
            continue
        if "tfevents" in path.name:
            name = f"{path.parent.relative_to(directory).as_posix()}/events"
        facts, values = _read_file(path)
        names.append((name, facts))
        numbers[name] = values
    return names, numbers


def _read_file(path):
    if path.name.endswith(".h5"):
        return _read_h5(path)
    if path.name.endswith(".keras"):
        return _read_keras(path)
    if path.name.endswith(".csv"):
        header, *rows = path.read_text().splitlines()
        return header, [[float(f) for f in row.split(",")] for row in rows]
    if path.name.endswith(".json"):
        return path.read_text(), []
    if "tfevents" in path.name:
        return _read_events(path)
    return "?", []


def _read_h5(source):
    facts, values = [], []

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            facts.append((name, item.shape, str(item.dtype)))
            values.append(np.asarray(item))

    with h5py.File(source, "r") as file:
        file.visititems(visit)
    return tuple(facts), values


def _read_keras(path):
    facts, values = [], []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            content = archive.read(name)
            if name.endswith(".h5"):
                inner, numbers = _read_h5(io.BytesIO(content))
                facts.append((name, inner))
                values += numbers
            elif name == "config.json":
                facts.append((name, json.loads(content)))
            else:
                facts.append((name, sorted(json.loads(content))))
    return facts, values


def _read_events(path):
    import tensorflow as tf

    facts, values = [], []
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            facts.append((event.step, value.tag))
            if "steps_per_second" not in value.tag:
                values.append(tf.make_ndarray(value.tensor))
    return tuple(facts), values
