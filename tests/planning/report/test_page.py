"""The page of a plan."""

import html.parser
import re

import pytest

from keras_strategies.planning.report.page import make_page
from tests.planning.made import step, times
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


def parts(page):
    """Left and right ends of the parts of bars, and limits, in percent."""
    ends, limits = [], []
    for tag, attrs in page.found:
        if tag == "rect" and attrs.get("class", "").startswith("part"):
            x, width = (float(attrs[n].rstrip("%")) for n in ("x", "width"))
            ends.append((attrs["class"][5:], x, x + width))
        elif tag == "line":
            limits.append(float(attrs["x1"].rstrip("%")))
    return ends, limits


def test_a_page_needs_nothing_beside_itself():
    text = make_page(PLAN.steps, PLAN.notes)
    page = Page(text)
    assert text.startswith("<!doctype html>")
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    assert {a["href"] for a in page.all_of("a")} <= {
        f"#{a['id']}" for a in page.all_of("section") if "id" in a
    }


def test_a_page_says_all_of_every_candidate():
    text = Page(make_page(PLAN.steps, PLAN.notes)).text
    for words in (
        "2 of 5 candidates fit; 1 unknown.",
        "weights 1.00 GB",
        "activations 4.00 GB",
        "10.0 of 16.0 GB",
        "7 on each replica (estimated)",
        "7 on each replica (verified by compiling: one more does not fit)",
        "500.0 ms",
        "262,144 tokens, 128 rows",
        "40 % (50 % at the largest bound's speed)",
        "12 all-gather, 3.00 GB in total",
        "extrapolated to 80 equal blocks from models with 2 and 4 blocks",
        "at low effort; at full effort, the step may need up to 20 % less or "
        "50 % more memory",
        "Use a larger group ( shards ), or a larger slice.",
        "The cores of a replica are a box [of the slice].",
        "does not fit",
        "no result",
        "unknown",
        "Times are estimates.",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("steps", "summary"),
    [
        ([], "There are no candidates."),
        (
            [step()],
            "1 of 1 candidate fits: v5e:4x4 sharded, with 262,144 tokens "
            "per second.",
        ),
        ([step(bytes_in_all=30e9)], "0 of 1 candidate fits."),
        (
            [step(layout="slots", tokens=None, rows=128), step(tokens=None)],
            "2 of 2 candidates fit. The fastest per device is v5e:4x4 "
            "slots, with 256 rows per second.",
        ),
    ],
)
def test_the_summary(steps, summary):
    assert summary in Page(make_page(steps)).text


def test_the_parts_of_a_bar_follow_each_other_up_to_the_limit():
    ends, (limit,) = parts(Page(make_page([step()])))
    kinds = ["weights", "slots", "other", "gradients", "activations"]
    assert [kind for kind, _, _ in ends] == [*kinds, "temporary"]
    for (_, _, end), (_, start, _) in zip(ends, ends[1:], strict=False):
        assert start == pytest.approx(end, abs=0.02)
    assert ends[0][1] == 0
    assert ends[-1][2] / limit == pytest.approx(10 / 16, abs=1e-3)


def test_what_does_not_fit_runs_past_the_limit_and_bars_share_it():
    big = step(bytes_in_all=24e9, memory={"weights": 24e9})
    ends, limits = parts(Page(make_page([step(), big])))
    assert limits[0] == limits[1]
    assert ends[-1][2] / limits[1] == pytest.approx(1.5, abs=1e-3)


def test_a_bar_many_limits_long_is_cut_off():
    huge = step(bytes_in_all=900e9, memory={"weights": 900e9})
    text = make_page([huge])
    ends, (limit,) = parts(Page(text))
    assert ends[-1][2] == 100
    assert 40 < limit < 60
    assert "»" in text
    assert "900.0 of 16.0 GB" in text


def test_what_kinds_do_not_tell_is_a_part_of_its_own():
    ends, _ = parts(Page(make_page([step(bytes_in_all=12e9)])))
    assert ends[-1][0] == "rest"
    ends, _ = parts(Page(make_page([step(memory={})])))
    assert [kind for kind, _, _ in ends] == ["rest"]


@pytest.mark.parametrize(
    "given",
    [
        {"bytes_in_all": 0.0, "memory": {}, "limit_bytes": None},
        {"estimate": times(0.0, 0.0, 0.0, 0.0, None)},
        {"num_replicas": 0, "rows": 0},
        {"counts": {"all-reduce": 1}, "sent": {}},
    ],
)
def test_nothing_is_a_page_too(given):
    assert "nan" not in make_page([step(**given)])


def test_everything_given_is_escaped():
    bad = "<script>\"&'`</code>"
    steps = [
        step(topology=bad, layout=bad, advice=bad, error=bad),
        step(counts={bad: 1}, sent={bad: 1.0}),
    ]
    page = Page(make_page(steps, (bad,)))
    assert not page.all_of("script")
    assert page.text.count("<script>") > 6


def test_a_notebook_shows_the_page_in_a_frame_of_its_own():
    (frame,) = Page(PLAN._repr_html_()).all_of("iframe")
    assert (
        frame["srcdoc"] == PLAN.to_html() == make_page(PLAN.steps, PLAN.notes)
    )
    assert frame["sandbox"] is None
