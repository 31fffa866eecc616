"""Tests of Estimators run outside of a cluster, unless they set TF_CONFIG."""

import pytest


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
