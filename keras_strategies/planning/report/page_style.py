"""The CSS of a plan's HTML page."""

from keras_strategies.planning.report.planned_step import KINDS

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675;
  --page: #f5f6f8; --card: #fff; --line: #dfe3e8; --bad: #b3261e;
  --good: #1c7340; --note: #1f5fa8; --weights: #0072b2; --slots: #56b4e9;
  --other: #8b94a1; --gradients: #e69f00; --activations: #009e73;
  --temporary: #cc79a7; --code: #f0e442; --time: #5b7fa8; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8ebf0;
  --soft: #a3adba; --page: #14171c; --card: #1d2229; --line: #323a45;
  --bad: #ff8a80; --good: #7bd69b; --note: #8ec0ff; --weights: #2b90cc;
  --other: #78818e; --time: #7fa6d4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.05rem; margin: 0; overflow-wrap: anywhere; }
h2 span { color: var(--soft); font-weight: 400; }
h3 { font-size: .9rem; margin: 1rem 0 .2rem; color: var(--soft);
  font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: 1rem 1.1rem; margin: 0 0 1rem;
  break-inside: avoid; }
p { margin: .5rem 0 0; overflow-wrap: anywhere; }
a { color: inherit; text-underline-offset: .2em; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.summary { border-left: .4rem solid var(--note); font-weight: 600; }
.summary p { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right;
  border-top: 1px solid var(--line); white-space: nowrap; }
thead th, thead th:first-child { border-top: 0; padding-top: 0;
  color: var(--soft); font-weight: 400; }
th:first-child { text-align: left; white-space: normal;
  overflow-wrap: anywhere; min-width: 7rem; font-weight: 600; }
th:last-child, td:last-child { padding-right: 0; }
th span { color: var(--soft); font-weight: 400; }
.head { display: flex; flex-wrap: wrap; gap: .1rem .75rem;
  justify-content: space-between; align-items: baseline; }
.fits { font-weight: 600; }
.yes { color: var(--good); }
.no { color: var(--bad); }
.maybe { color: var(--soft); }
svg { display: block; width: 100%; overflow: visible; }
svg text { font-size: .75rem; fill: var(--ink); }
.limit { stroke: var(--ink); stroke-width: 2; }
.cut { font-size: 1.25rem; font-weight: 700; }
.box { fill: none; stroke: var(--line); }
.part { stroke: var(--card); stroke-width: 1; }
.kinds { list-style: none; display: flex; flex-wrap: wrap; margin: .4rem 0 0;
  padding: 0; gap: .1rem 1.1rem; font-size: .9rem; }
.kinds svg { display: inline-block; width: .75rem; height: .75rem;
  margin-right: .4rem; vertical-align: -.05rem; }
dl { display: grid; grid-template-columns: minmax(8rem, 22%) 1fr;
  margin: 1rem 0 0; gap: .3rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.times { display: grid; grid-template-columns: auto 1fr auto;
  gap: .1rem .8rem; align-items: center; font-size: .9rem; }
.times b { text-align: right; font-weight: 400; }
.times .most { font-weight: 600; }
.remark { border-left: .25rem solid; padding-left: .75rem; }
.remark span { color: var(--ink); }
.advice { border-color: var(--note); }
footer p { color: var(--soft); font-size: .9rem; }
@media (max-width: 40rem) { .less { display: none; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444;
  --page: #fff; --line: #bbb; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } }
"""
_COLORS = "".join(
    f".{kind} {{ fill: var(--{kind}); }}\n" for kind in (*KINDS, "time")
)
STYLE = f"{_STYLE}{_COLORS}.rest {{ fill: var(--other); fill-opacity: .5; }}\n"
