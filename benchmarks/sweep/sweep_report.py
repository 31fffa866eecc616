"""What the sweep's records say: ratios, limits, tables and a picture."""

import collections
import dataclasses
import json
import math
import pathlib
import statistics

import sweep_points
import sweep_svg

BOOTSTRAPS = 2000
SHORT_MS, MORE_MS = 1.0, 0.15
HEADS = ("dataparallel", "raw", "ours_even")
# Points that miss by what XLA does, and the case of upstream.py that shows it.
UPSTREAM = {
    "sample-13": "rounded",
    "sample-15": "recurrent",
    "sample-43": "recurrent",
}
BATCH_STATISTICS = ("BatchNormalization", "SyncBatchNormalization")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours beside a peer, on one point.

    Attributes:
      peer: The peer's name.
      middle: Median over neighboring turns of ours divided by the peer's;
        for `ours_even` of the times of a row.
      low: Lower end of the median's 90 % bootstrap interval.
      high: Its upper end.
      limit: What it must not exceed; None where the peer does not judge.
      is_miss: Whether it does, beyond noise.
    """

    peer: str
    middle: float
    low: float
    high: float
    limit: float | None
    is_miss: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A point, its record and its ratios by peer."""

    point: dict
    record: dict
    ratios: dict

    @property
    def judged(self):
        return [r for r in self.ratios.values() if r.limit is not None]

    @property
    def worst(self):
        """The largest ratio to its limit; infinite where ours failed."""
        if "ours" in self.record["left_out"]:
            return math.inf
        return max((r.middle / r.limit for r in self.judged), default=0)

    @property
    def verdict(self):
        if "ours" in self.record["left_out"]:
            return "FAILED"
        if not self.judged:
            return "no judge"
        if not any(r.is_miss for r in self.judged):
            return "ok"
        case = UPSTREAM.get(self.point["id"])
        return f"XLA: {case}" if case else "MISS"


def records(file):
    """Each point's record: its last one, and the turns that were added."""
    file = pathlib.Path(file)
    if not file.exists():
        return []
    found = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        known = found.get(record["id"])
        if record.get("is_added") and known is not None:
            for peer, turns in record["ms"].items():
                known["ms"].setdefault(peer, []).extend(turns)
            known["sessions"] = known.get("sessions", 1) + 1
        else:
            found[record["id"]] = record
    return list(found.values())


def misses(file):
    """Ids of the points that miss a limit."""
    return {r.point["id"] for r in read_results(file) if r.verdict == "MISS"}


def limits(point):
    """The peers that judge a point, and the ratio each allows."""
    if point["extra"]:
        return {"ours_even": 1.2}
    if point["processes"] > 1:
        return {"raw": 1.1 if point["width"] == 1200 else 1.2}
    is_unfair = (
        point["layer"] in BATCH_STATISTICS
        or point["base"] == "resnet"
        or point["loop"] == "run"
    )
    if is_unfair:
        return {"raw": 1.2}
    if point["devices"] > 2:
        return {"dataparallel": 1.2}
    if is_once_slow(point):
        return {"dataparallel": 1.0, "raw": 1.2}
    return {"dataparallel": 1.1, "raw": 1.2}


def is_once_slow(point):
    """Whether it is one of the MLPs that one flat buffer made slow."""
    usual = sweep_points.point("", "mlp", "")
    return (
        point["width"] in (256, 512)
        and 4 <= point["rows"] <= 32
        and all(
            point[name] == value
            for name, value in usual.items()
            if name not in ("id", "factor", "width", "rows")
        )
    )


def result(point, record):
    """The point's ratios."""
    ours = record["ms"].get("ours", [])
    allowed = limits(point)
    if "dataparallel" in record["left_out"] and point["devices"] > 2:
        # XLA aborts it: the raw loop judges instead.
        allowed = {"raw": 1.2}
    ratios = {
        peer: ratio(point, peer, ours, ms, allowed.get(peer))
        for peer, ms in record["ms"].items()
        if peer != "ours" and ours
    }
    return Result(point=point, record=record, ratios=ratios)


def ratio(point, peer, ours, theirs, limit):
    import numpy as np

    count = min(len(ours), len(theirs))
    ours, theirs = np.array(ours[:count]), np.array(theirs[:count])
    if peer == "ours_even":
        even = sweep_points.batch_rows(point | {"extra": 0})
        theirs = theirs * sweep_points.batch_rows(point) / even
    middle, low, high = interval(ours / theirs)
    is_miss = limit is not None and low > limit
    if is_miss and np.median(ours) < SHORT_MS:
        is_miss = interval(ours - theirs)[1] > MORE_MS
    return Ratio(
        peer=peer,
        middle=middle,
        low=low,
        high=high,
        limit=limit,
        is_miss=bool(is_miss),
    )


def interval(values):
    """The median, and its 90 % bootstrap interval."""
    import numpy as np

    random = np.random.default_rng(0)
    drawn = random.choice(values, (BOOTSTRAPS, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (5, 95))
    return float(np.median(values)), float(low), float(high)


def geometric(values):
    """The geometric mean; None of nothing."""
    values = list(values)
    return statistics.geometric_mean(values) if values else None


def by_factor(results):
    """(factor, value, family, peer): geometric mean of ours / peer.

    Only points in which one factor was varied.
    """
    cells = collections.defaultdict(list)
    for each in results:
        factor = each.point["factor"]
        if factor == "sample":
            continue
        value = each.point["base" if factor == "stack" else factor]
        if factor == "base":
            value = "as it is"
        family = sweep_points.FAMILY[each.point["base"]]
        for peer, told in each.ratios.items():
            cells[factor, str(value), family, peer].append(told.middle)
    return {cell: geometric(values) for cell, values in cells.items()}


def factor_rows(results):
    """Each factor's values with their geometric means, as texts."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for (factor, value, _, peer), mean in by_factor(results).items():
        found[factor, value][peer].append(mean)
    for (factor, value), means in found.items():
        told = (geometric(means.get(peer, ())) for peer in HEADS)
        yield [factor, value, *("" if m is None else f"{m:.2f}x" for m in told)]


def summary(results):
    """What the table does not say by itself, as (words, value) pairs."""
    lines = []
    for name, points in {
        "fixed points": [r for r in results if r.point["quick"]],
        "all points": results,
    }.items():
        for spe in (1, 20):
            ratios = [
                r.ratios["dataparallel"].middle
                for r in points
                if "dataparallel" in r.ratios
                and r.point["loop"] == "fit"
                and r.point["spe"] == spe
                and r.point["devices"] == 2
            ]
            lines.append((f"K={spe} fit / DataParallel, {name}", ratios))
    for peer in ("dataparallel", "raw", "one", "tf", "nightly", "ours_even"):
        ratios = [r.ratios[peer].middle for r in results if peer in r.ratios]
        lines.append((f"ours / {peer}", ratios))
    for devices in (1, 2, 4, 8):
        ratios = [
            r.ratios["dataparallel"].middle
            for r in results
            if "dataparallel" in r.ratios and r.point["devices"] == devices
        ]
        lines.append((f"ours / DataParallel, {devices} devices", ratios))
    lines.append(("first step, ours / DataParallel", first_steps(results)))
    return [(words, geometric(v), len(v)) for words, v in lines if v]


def first_steps(results):
    """Ratios of the times to a first step, in processes that are warm."""
    told = [each.record["told"] for each in results]
    return [
        t["ours"]["first_s"] / t["dataparallel"]["first_s"]
        for t in told
        if {"ours", "dataparallel"} <= t.keys()
    ]


def described(point):
    """What differs from the base."""
    usual = sweep_points.point("", point["base"], "")
    changed = [
        str(value) if isinstance(value, str) else f"{name} {value}"
        for name, value in point.items()
        if name in usual and name not in ("id", "factor", "base")
        if value != usual[name]
    ]
    return ", ".join([point["base"], *changed])


def rows(results):
    """The table: a row of texts for each point, the worst first.

    Those on more devices than 2 (than most machines' cores) come last.
    """
    order = sorted(results, key=lambda r: (r.point["devices"] > 2, -r.worst))
    for each in order:
        ms = {
            peer: statistics.median(turns)
            for peer, turns in each.record["ms"].items()
        }
        cells = [cell(each.ratios.get(p)) for p in ("dataparallel", "raw")]
        others = [
            f"{peer} {ms[peer]:.2f} {told.middle:.2f}x"
            for peer, told in each.ratios.items()
            if peer not in ("dataparallel", "raw", "ours_even")
        ]
        if "ours_even" in each.ratios:
            others.append(f"per row of even {cell(each.ratios['ours_even'])}")
        yield [
            each.point["id"],
            described(each.point),
            f"{ms['ours']:.2f}" if "ours" in ms else "",
            *cells,
            "; ".join(others),
            ", ".join(f"{r.peer} {r.limit}" for r in each.judged),
            each.verdict,
        ]


COLUMNS = (
    "point",
    "factors",
    "ours, ms",
    "/ DataParallel",
    "/ raw loop",
    "/ others",
    "judge, limit",
    "",
)


def cell(ratio):
    if ratio is None:
        return ""
    return f"{ratio.middle:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def read_results(file):
    points = {point["id"]: point for point in sweep_points.load()}
    return [result(points[r["id"]], r) for r in records(file)]


def report(file, options):
    """Prints the table and the means; writes what was asked for."""
    from rich.console import Console
    from rich.table import Table

    results = read_results(file)
    table = Table(title="A step of ours beside its peers, the worst first")
    for column in COLUMNS:
        table.add_column(column)
    for row in rows(results):
        table.add_row(*row)
    means = Table("factor", "value", *(f"/ {peer}" for peer in HEADS))
    for row in factor_rows(results):
        means.add_row(*row)
    console = Console(width=150)
    console.print(table, means)
    for words, mean, count in summary(results):
        console.print(f"{words}: {mean:.2f}x ({count} points)")
    verdicts = collections.Counter(r.verdict for r in results)
    console.print(
        ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
    )
    for result in results:
        for peer, why in result.record["left_out"].items():
            text = why.strip().splitlines()[-1] if why.strip() else ""
            console.print(
                f"{result.point['id']}: without {peer}: {text[:100]}",
                markup=False,
            )
    written = {"json": as_json, "markdown": markdown, "svg": picture}
    for kind, make in written.items():
        if getattr(options, kind):
            pathlib.Path(getattr(options, kind)).write_text(make(results))


def as_json(results):
    told = [
        {
            "point": each.point,
            "ratios": [dataclasses.asdict(r) for r in each.ratios.values()],
            "verdict": each.verdict,
            **each.record,
        }
        for each in results
    ]
    means = [
        {"what": words, "ratio": mean, "points": count}
        for words, mean, count in summary(results)
    ]
    factors = list(factor_rows(results))
    return json.dumps(
        {"points": told, "means": means, "factors": factors}, indent=1
    )


def markdown(results):
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows(results)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    means = "\n".join(
        f"| {words} | {mean:.2f}x | {count} |"
        for words, mean, count in summary(results)
    )
    head = "| geometric mean | ratio | points |\n|---|---|---|"
    return f"{head}\n{means}\n\n{table}\n"


def picture(results):
    """The heat map: values of factors beside base models and peers."""
    cells = by_factor(results)
    heads = [
        (family, peer)
        for peer in HEADS
        for family in sweep_points.BASES
        if any(key[2:] == (family, peer) for key in cells)
    ]
    groups = {}
    for factor, value, *_ in cells:
        values = groups.setdefault(factor, [])
        if value not in values:
            values.append(value)
    for values in groups.values():
        values.sort(key=lambda v: (not v.lstrip("-").isdigit(), len(v), v))
    return sweep_svg.heat_map(
        groups,
        heads,
        {(f, v, (family, p)): m for (f, v, family, p), m in cells.items()},
        title="Time of a step, ours / peer's",
    )
