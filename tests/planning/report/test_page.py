"""The page of a plan."""

import html.parser
import itertools
import re

import pytest

from keras_strategies.planning.report.table import Plan
from tests.planning.made import step
from tests.planning.report.test_table import PLAN

pytestmark = pytest.mark.quick

VOID = ("meta", "br", "wbr")


class Page(html.parser.HTMLParser):
    """Every element is closed; notes them, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all_of(self, tag):
        return [attrs for found, attrs in self.found if found == tag]


def test_a_page_needs_nothing_beside_itself():
    text = PLAN.to_html()
    assert text.startswith("<!DOCTYPE html>")
    tags = {tag for tag, _ in Page(text).found}
    assert not tags & {"script", "link", "img", "iframe", "object", "a"}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)


def test_a_page_says_all_of_every_candidate():
    text = Page(PLAN.to_html()).text
    for words in (
        "v5e:4x4 sharded: fits",
        "weights 1.00 GB",
        "activations 4.00 GB",
        "in total 10.0 GB",
        "limit 16.0 GB",
        "At full effort, as for training, a step may need up to 20 % less or "
        "50 % more memory.",
        "Use a larger group (`shards`), or a larger slice.",
        "The cores of a replica are a box [of the slice].",
        "does not fit",
        "no result",
        "unknown",
        "Times are estimates.",
    ):
        assert words in text, words


def drawn(planned):
    """The text before each bar, and the ends of the bar in columns."""
    words = "".join(Page(Plan(steps=(planned,)).to_html()).words)
    found = {}
    for line in words[words.index(":") :].splitlines():
        if blocks := re.search("[\u2580-\u259f][\u2580-\u259f ]*", line):
            name = line[: blocks.start()].split()[0]
            found[name] = (blocks.start(), len(line.rstrip()))
    return found


def test_parts_of_memory_follow_each_other_up_to_the_limit():
    ends = drawn(step())
    kinds = ["weights", "slots", "other", "gradients", "activations"]
    assert list(ends) == [*kinds, "temporary"]
    spans = list(ends.values())
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert abs(start - end) <= 1
    length = drawn(step(bytes_in_all=16e9, memory={"weights": 16e9}))
    full = length["weights"][1] - spans[0][0]
    assert (spans[-1][1] - spans[0][0]) / full == pytest.approx(
        10 / 16, abs=0.02
    )


def test_memory_without_a_category_is_shown():
    assert list(drawn(step(bytes_in_all=12e9)))[6] == "unspecified"
    assert next(iter(drawn(step(memory={})))) == "unspecified"


@pytest.mark.parametrize(
    "given",
    [
        {"bytes_in_all": 0.0, "memory": {}, "limit_bytes": None},
        {"num_replicas": 0, "rows": 0},
    ],
)
def test_nothing_is_a_page_too(given):
    assert "nan" not in Plan(steps=(step(**given),)).to_html()


def test_everything_given_is_escaped():
    bad = "<script>\"&'`</code>"
    steps = [step(topology=bad, layout=bad, advice=bad, error=bad)]
    page = Page(Plan(steps=steps, notes=(bad,)).to_html())
    assert not page.all_of("script")
    assert page.text.count("<script>") > 4
