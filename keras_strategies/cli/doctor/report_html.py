"""A report of `doctor` as one page, which needs nothing beside itself."""

import re
from html import escape

from keras_strategies.cli.doctor.findings import Finding, Level, Part, Report

_FLAG = re.compile(r"--[\w=.]*\w")
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675;
  --page: #f5f6f8; --card: #fff; --line: #dfe3e8; --fault: #b3261e;
  --warning: #8a5a00; --note: #1f5fa8; --good: #1c7340; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8ebf0;
  --soft: #a3adba; --page: #14171c; --card: #1d2229; --line: #323a45;
  --fault: #ff8a80; --warning: #f3c063; --note: #8ec0ff;
  --good: #7bd69b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 52rem; padding: 1.5rem 1rem 3rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
header p { margin: .25rem 0 1.25rem; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: 1rem 1.1rem; margin: 0 0 1rem;
  break-inside: avoid; }
.result { border-left: .4rem solid; font-weight: 600; }
.finding { border-left: .25rem solid; padding: .1rem 0 .1rem .75rem;
  margin: .6rem 0 0; display: grid; gap: 0 .75rem;
  grid-template-columns: 4.5rem 1fr; font-weight: 400; }
.finding p { margin: 0; color: var(--ink); overflow-wrap: anywhere;
  grid-column: 2; }
.finding .fix { color: var(--soft); }
.level { font-size: .9rem; font-weight: 600; }
code { font: .9em ui-monospace, monospace; word-break: break-all; }
.fault { color: var(--fault); border-color: var(--fault); }
.warning { color: var(--warning); border-color: var(--warning); }
.note { color: var(--note); border-color: var(--note); }
.good { color: var(--good); border-color: var(--good); }
dl { display: grid; grid-template-columns: minmax(8rem, 30%) 1fr;
  margin: 0; gap: .3rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; white-space: pre-line; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
@media (max-width: 34rem) { .finding { display: block; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444;
  --page: #fff; --line: #bbb; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } }
"""


def as_html(report: Report) -> str:
    """The page's text. It asks for no other file and runs no script."""
    worst = report.wrong[0].level if report.wrong else Level.GOOD
    where = ", ".join(filter(None, [report.host, report.process, report.when]))
    summary = report.summary[:1].upper() + report.summary[1:]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>keras-strategies doctor: {escape(report.summary)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>keras-strategies doctor</h1>
<p>{escape(where)}</p>
</header>
<main>
<section class="result {worst}">{escape(summary)}
{"".join(map(_of_finding, report.wrong))}</section>
{"".join(map(_of_part, report.parts))}
</main>
</body>
</html>
"""


def _of_part(part: Part) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{_text(value)}</dd>\n"
        for name, value in part.rows
    )
    # What is wrong is said above.
    findings = "".join(map(_of_finding, part.calm))
    if not rows and not findings:
        return ""
    table = f"<dl>\n{rows}</dl>" if rows else ""
    return (
        f"<section><h2>{escape(part.title)}</h2>{table}{findings}</section>\n"
    )


def _of_finding(finding: Finding) -> str:
    fix = f'<p class="fix">{_text(finding.fix)}</p>' if finding.fix else ""
    return (
        f'<div class="finding {finding.level}">'
        f'<span class="level">{finding.level.title()}</span>'
        f"<p>{_text(finding.text)}</p>{fix}</div>\n"
    )


def _text(text: str) -> str:
    """Text for a page; flags are not broken after their first hyphens."""
    return _FLAG.sub(r"<code>\g<0></code>", escape(text))
