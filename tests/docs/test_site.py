"""The site that `./run docs` builds: its pages, links, names and packages."""

import functools
import os
import pathlib
import posixpath
import re
import shutil
import sys
import tomllib

import pytest

from tests.docs.public_names import public_names
from tests.support.commands import call

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
PAGES = sorted(path.relative_to(ROOT) for path in DOCS.rglob("*.md"))
TEXTS = [pathlib.Path("README.md"), pathlib.Path("CONTRIBUTING.md"), *PAGES]
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
CODE = re.compile(r"^( *)(`{3,}).*?^\1\2$|`[^`\n]+`", re.M | re.S)


@functools.cache
def text_of(path):
    return (ROOT / path).read_text("utf-8")


def find_anchors(text):
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub(_without_fence, text), re.M)
    plain = (re.sub(r"[^\w\s-]", "", h.lower()).strip() for h in headings)
    return {re.sub(r"\s+", "-", heading) for heading in plain}


def _without_fence(match):
    return "" if match[2] else match[0]


def broken_links(path, text):
    """The links of a page that lead nowhere; those to the web are left out."""
    broken = []
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        directory = posixpath.dirname(path.as_posix())
        target = posixpath.normpath(posixpath.join(directory, place))
        if place and not (ROOT / target).exists():
            broken.append(link)
        elif anchor:
            page = text_of(target) if place else text
            if anchor not in find_anchors(page):
                broken.append(link)
    return broken


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_links_lead_somewhere(path):
    assert broken_links(path, text_of(path)) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](tpu.md)", []),
        ("[a](no.md)", ["no.md"]),
        ("[a](../examples/no.py)", ["../examples/no.py"]),
        ("[a](../examples/digits_fit.py)", []),
        ("[a](tpu.md#no-such)", ["tpu.md#no-such"]),
        ("## A *new* `one`, here\n[a](#a-new-one-here)", []),
        ("```sh\n# b\n```\n[a](#b)", ["#b"]),
        ("`[a](no.md)` and [`b`](none.md)", ["none.md"]),
        ("[a](https://example.com/no.md)", []),
    ],
)
def test_broken_links_are_found(text, broken):
    assert broken_links(pathlib.Path("docs/x.md"), text) == broken


def test_nav_lists_every_page_once():
    nav = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", CONFIG, re.M)
    assert sorted(nav) == [str(page.relative_to("docs")) for page in PAGES]


def described(text):
    """The dotted names that an API page describes."""
    others = re.findall(r"^\| `ks\.(\S+)` \|", text, re.M)
    return [
        *re.findall(r"^::: (\S+)$", text, re.M),
        *(f"keras_strategies.{name}" for name in others),
    ]


def test_every_public_name_has_one_place():
    pages = [text_of(path) for path in PAGES if path.parent.name == "api"]
    found = [name for text in pages for name in described(text)]
    assert len(found) == len(set(found))
    names = public_names()
    assert names.keys() - set(found) == set()
    # What else is described are modules.
    modules = {name.rpartition(".")[0] for name in names}
    assert set(found) - names.keys() <= modules


def test_references_are_to_names_that_are_described():
    api = {name for path in PAGES for name in described(text_of(path))}
    references = [
        name
        for path in PAGES
        for name in re.findall(r"\]\[(\w[\w.]*)\]", text_of(path))
    ]
    assert len(references) > 3
    assert set(references) <= api


def test_api_index_names_every_page():
    index = text_of("docs/api/index.md")
    linked = set(re.findall(r"^\| \[.+?\]\((\w+\.md)\)", index, re.M))
    pages = {path.name for path in (DOCS / "api").glob("*.md")}
    assert linked == pages - {"index.md"}


def test_packages_are_pinned():
    for package in packages():
        assert re.search(r"==[\d.]+$|<\d", package), package
    assert any(package.startswith("mkdocs==1.") for package in packages())


def packages():
    """What the extra `docs` asks for."""
    text = text_of("pyproject.toml")
    return tomllib.loads(text)["project"]["optional-dependencies"]["docs"]


def foreign_parts(html):
    """What a page fetches from elsewhere when it is opened."""
    tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", html)
    return [
        tag
        for tag in tags
        if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)
        and 'rel="canonical"' not in tag
    ]


@pytest.mark.parametrize(
    ("html", "count"),
    [
        ('<script src="assets/a.js"></script>', 0),
        ('<script async src="https://cdn.example/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', 1),
        ('<a href="https://example.com">there</a>', 0),
    ],
)
def test_foreign_parts_are_found(html, count):
    assert len(foreign_parts(html)) == count


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment of its own, with what the extra `docs` asks for."""
    directory = tmp_path_factory.mktemp("env")
    call(sys.executable, "-m", "venv", directory)
    python = directory / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", *packages())
    return python


def build(python, root, site):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = (python, "-m", "mkdocs", "build", "--strict", "--site-dir", site)
    return call(*command, cwd=root, env=environment)


@pytest.mark.slow
def test_it_builds_strictly_and_fetches_nothing(python, tmp_path):
    site = tmp_path / "site"
    build(python, ROOT, site)
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        assert foreign_parts(page.read_text("utf-8")) == [], page
    for path in (site / "assets").rglob("*.css"):
        assert not re.search(r"url\(.?https?:", path.read_text("utf-8")), path
    assert (site / "search" / "search_index.js").stat().st_size > 10_000
    example = (site / "source/examples/digits_fit.py.html").read_text("utf-8")
    assert "load_digits" in example
    assert "source/examples/digits_fit.py.html" in (
        site / "examples.html"
    ).read_text("utf-8")
    shown = "".join(p.read_text("utf-8") for p in (site / "api").glob("*.html"))
    for name in public_names():
        short = name.removeprefix("keras_strategies.")
        assert f'id="{name}"' in shown or f"<code>ks.{short}" in shown, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[there](no.md)", "'no.md'"),
        ("[there](tpu.md#no-such)", "'#no-such'|no anchor"),
        ("[there](../examples/no.py)", "'../examples/no.py'"),
        ("[there][keras_strategies.NoSuch]", "'keras_strategies.NoSuch'"),
        ("::: keras_strategies.NoSuch", "keras_strategies.NoSuch"),
    ],
)
def test_a_broken_link_or_reference_ends_the_build(
    python, tmp_path, text, named
):
    for name in ("examples", "keras_strategies", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("mkdocs.yml", "docs_hooks.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{text}\n")
    with pytest.raises(AssertionError, match=rf"({named})[\s\S]*Aborted"):
        build(python, tmp_path, tmp_path / "site")
