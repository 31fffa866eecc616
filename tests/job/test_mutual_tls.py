"""Checks of mutual TLS before JAX starts, which reads the files itself."""

import os
import subprocess

import pytest

from keras_strategies.cli.doctor.findings import Level
from keras_strategies.cli.doctor.installed import check_variables
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job.mutual_tls import (
    CA,
    CERT,
    FILES,
    KEY,
    REQUIRED,
    read_mutual_tls,
)
from tests.support.certificates import RECIPE, make_certificates

pytestmark = pytest.mark.quick

HOST = "127.0.0.1"
TASK = TaskInfo(
    type="worker",
    index=0,
    is_chief=True,
    process_id=0,
    num_processes=2,
    addresses=("127.0.0.1:1", "127.0.0.1:2"),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("good"), HOST, "host0")


def test_files_of_the_recipe_are_good(good):
    assert read_mutual_tls(good, is_supported=True)
    assert sorted(os.listdir(os.path.dirname(good[CERT]))) == [
        *("ca.pem", "cert.pem", "key.pem")
    ]
    assert os.stat(good[KEY]).st_mode & 0o077 == 0


def test_without_variables_there_is_none():
    for environ in ({}, {CERT: ""}, {REQUIRED: "false"}):
        assert not read_mutual_tls(environ, is_supported=False)


def test_options_of_jax_come_first(good):
    options = {CA.lower(): "/none", REQUIRED.lower(): False}
    with pytest.raises(ValueError, match=f"{CA} must be .*'/none'"):
        read_mutual_tls(good, options, is_supported=True)
    options = {name.lower(): good[name] for name in FILES}
    assert read_mutual_tls({}, options, is_supported=True) == {
        name.removeprefix("JAX_").lower(): good[name] for name in FILES
    }


@pytest.mark.parametrize("name", [*FILES, REQUIRED])
def test_an_older_jax_would_ignore_it(name):
    with pytest.raises(ValueError, match=f"0.11.2.*Received: {name}"):
        read_mutual_tls({name: "true"}, is_supported=False)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({REQUIRED: "1"}, f"{CERT} must be"),
        ({CERT: RECIPE}, f"{KEY} must be"),
        ({CERT: RECIPE, KEY: RECIPE}, f"{CA} must be"),
    ],
)
def test_variables_that_are_missing(environ, said):
    with pytest.raises(ValueError, match=said):
        read_mutual_tls(environ, is_supported=True)


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(good, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe", "a\0b"):
        with pytest.raises(ValueError, match=f"^{name} must be") as caught:
            read_mutual_tls(good | {name: str(path)}, is_supported=True)
        assert "Set all of" in str(caught.value)
    with pytest.raises(ValueError, match="must be") as caught:
        read_mutual_tls(good | {name: "a" * 10_000}, is_supported=True)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["1.2.3.4.5", "256.1.1.1"])
def test_the_recipe_keeps_no_key_of_a_ca_if_openssl_fails(tmp_path, name):
    done = subprocess.run(
        ["sh", RECIPE, tmp_path, HOST, name], capture_output=True, check=False
    )
    assert done.returncode != 0
    assert not list(tmp_path.glob("ca.key"))
    assert not list(tmp_path.glob("request.pem"))


@pytest.mark.parametrize(
    ("version", "changed", "expected"),
    [
        ("0.11.2", {}, None),
        ("0.10.2", {}, "0.11.2 or newer"),
        ("0.12.0.1", {KEY: "/none"}, "Received: '/none'"),
    ],
)
def test_doctor_checks_the_files(good, version, changed, expected):
    part = check_variables(good | changed, {"jax": version}.get)
    assert dict(part.rows).get("mutual TLS") == (None if expected else "on")
    texts = [f.text for f in part.findings if f.level is Level.PROBLEM]
    assert len(texts) == bool(expected)
    assert expected is None or expected in texts[0]
