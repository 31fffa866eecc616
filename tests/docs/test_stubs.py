"""The stubs and the lists of the API's pages are those of `_MODULES`."""

import pytest

from tests.support import stubs

pytestmark = pytest.mark.quick


def test_stubs_and_api_pages_are_fresh():
    texts = stubs.list_generated()
    assert len(texts) > 15
    stale = [
        path.relative_to(stubs.ROOT).as_posix()
        for path, text in texts.items()
        if path.read_text("utf-8") != text
    ]
    assert not stale, f"run `./run names`: {stale}"


def test_every_module_with_lazy_names_has_a_stub():
    modules = [
        path
        for path in (stubs.ROOT / stubs.PACKAGE).rglob("*.py")
        if "\n_MODULES = {" in path.read_text("utf-8")
    ]
    assert len(modules) > 5
    for path in modules:
        assert path.with_suffix(".pyi").exists(), path


def test_a_new_name_is_in_the_stub_and_on_its_page(monkeypatch):
    names = stubs.read_names("keras_strategies")
    names |= {"NewValue": "keras_strategies.spmd.values"}
    monkeypatch.setattr(stubs, "read_names", lambda module: names)
    line = "from keras_strategies.spmd.values import NewValue as NewValue\n"
    assert line in stubs.make_stub("keras_strategies")
    for name, is_listed in (("values", True), ("scope", False)):
        page = stubs.ROOT / "docs" / "api" / f"{name}.md"
        text = stubs.make_page(page.read_text("utf-8"))
        assert ("\n::: keras_strategies.NewValue\n" in text) is is_listed
