"""Files that processes of a job save."""

import types

import keras
import numpy as np
import pytest

from keras_strategies.fit.callbacks.chief_callbacks import make_saves_safe

MESH = types.SimpleNamespace(
    num_processes=2, spreads_shards=False, is_chief=False
)


def _make(kind=keras.Sequential, mesh=MESH):
    model = kind([keras.Input((2,)), keras.layers.Dense(3)])
    make_saves_safe(model, mesh, lambda: None)
    return model


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5", "a.h5"])
def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch, name):
    model = _make()
    save = model.save_weights if "weights" in name else model.save
    save(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / name).symlink_to(tmp_path / name)
    model.set_weights([np.ones((2, 3)), np.zeros(3)])
    save(str(tmp_path / "link" / name))
    assert (tmp_path / "link" / name).is_symlink()
    assert (tmp_path / name).read_bytes() != before
    monkeypatch.chdir(tmp_path)
    save(name)
    assert {p.name for p in tmp_path.iterdir()} == {name, "link"}


def test_a_file_stays_if_saving_fails(tmp_path):
    class Failing(keras.layers.Dense):
        def save_own_variables(self, store):
            raise RuntimeError("not today")

    model = _make()
    model.save_weights(tmp_path / "a.weights.h5")
    before = (tmp_path / "a.weights.h5").read_bytes()
    other = keras.Sequential([keras.Input((2,)), Failing(3)])
    make_saves_safe(other, MESH, lambda: None)
    with pytest.raises(RuntimeError, match="not today"):
        other.save_weights(tmp_path / "a.weights.h5")
    assert (tmp_path / "a.weights.h5").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_methods_of_the_user_stay(tmp_path):
    class Saving(keras.Sequential):
        def save(self, filepath="x", name=None):
            self.received = filepath, name

    model = _make(Saving)
    model.save()
    assert model.received == ("x", None)
    together = types.SimpleNamespace(
        num_processes=2, spreads_shards=True, is_chief=True
    )
    model = _make(Saving, together)
    model.save(filepath="a", name="b")
    assert model.received == ("a", "b")


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path):
    model = _make()
    path, blob = tmp_path / "a.keras", tmp_path / "blob.keras"
    path.touch()
    path.chmod(0o600)
    model.save(path, True)
    assert path.stat().st_mode & 0o777 == 0o600
    blob.touch()
    path.unlink()
    path.symlink_to(blob)
    model.save(path)
    assert path.is_symlink()
    keras.saving.load_model(path)


def test_names_may_be_as_long_as_files_can_have(tmp_path):
    path = tmp_path / f"{'a' * 244}.weights.h5"
    _make().save_weights(path)
    assert path.exists()


@pytest.mark.parametrize("answer", [True, False])
def test_existing_files_are_asked_about(tmp_path, monkeypatch, answer):
    questions = []

    def ask(path):
        questions.append(path)
        return answer

    monkeypatch.setattr(
        "keras.src.saving.saving_api.io_utils.ask_to_proceed_with_overwrite",
        ask,
    )
    model, path = _make(), tmp_path / "a.weights.h5"
    model.save_weights(path, overwrite=False)
    assert not questions
    before = path.read_bytes()
    model.set_weights([np.ones((2, 3)), np.zeros(3)])
    model.save_weights(path, overwrite=False)
    assert questions == [str(path)]
    assert (path.read_bytes() != before) == answer


def test_errors_name_the_users_path(tmp_path):
    model = _make()
    for save, name in ((model.save, "a.bin"), (model.save_weights, "a.h5")):
        with pytest.raises(ValueError, match=f"filepath={tmp_path}/{name}"):
            save(tmp_path / name)
    with pytest.raises(OSError, match=f"{tmp_path}/missing/a.keras"):
        model.save(tmp_path / "missing" / "a.keras")


def test_nothing_changes_in_one_process():
    one = types.SimpleNamespace(num_processes=1)
    assert "save" not in vars(_make(mesh=one))
