"""What `keras-strategies doctor` shows and advises."""

import dataclasses
import sys

import pytest

import keras_strategies as ks
from keras_strategies.cli import doctor, main


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str


def cpus(count):
    return [FakeDevice("cpu", "cpu")] * count


def test_doctor_shows_versions_and_devices(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert ks.__version__ in shown
    assert "8 x cpu" in shown


def test_content_of_tf_config_is_never_shown(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": "secret-address"}')
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "secret-address" not in shown
    assert "TF_CONFIG is set" in shown


def test_optional_packages_are_not_imported():
    loaded = set(sys.modules)
    rows = doctor.optional_packages()
    assert len(rows) == len(doctor.OPTIONAL_PACKAGES)
    assert not (set(sys.modules) - loaded) & set(doctor.OPTIONAL_PACKAGES)


def test_many_devices_are_one_line():
    devices = [FakeDevice("tpu", "TPU v5 lite")] * 256
    assert doctor.describe_devices(devices) == "256 x tpu (TPU v5 lite)"


@pytest.mark.parametrize(
    ("devices", "fault", "environ", "expected"),
    [
        (cpus(1), None, {}, doctor.VIRTUAL_DEVICES),
        ([FakeDevice("gpu", "H100")], None, {}, "one device"),
        (cpus(8), None, {}, "share 2 cores"),
        ([], "no driver", {}, "JAX_PLATFORMS=cpu"),
        (cpus(2), None, {"TF_CONFIG": "{}"}, "one machine"),
    ],
)
def test_advice(devices, fault, environ, expected):
    lines = doctor.advice(devices, fault, environ, num_cores=2)
    assert any(expected in line for line in lines)


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert ks.__version__ in capsys.readouterr().out


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["cure"])
    assert "cure" in capsys.readouterr().err


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
