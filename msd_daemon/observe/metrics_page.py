"""The table of metrics in docs/observing.md, made from METRICS.

`python -m msd_daemon.observe.metrics_page docs/observing.md` writes it between its marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msd_daemon.observe.metrics_table import METRICS

BEGIN = "<!-- metrics: made by python -m msd_daemon.observe.metrics_page docs/observing.md -->"
END = "<!-- end of metrics -->"


def metrics_table() -> str:
    """Return the table as Markdown."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels) or '-'} | {metric.help} |"
        for metric in METRICS
    ]
    return "\n".join(["| name | kind | labels | what it is |", "|---|---|---|---|", *rows])


def with_table(page: str) -> str:
    """Return a page with its table made anew.

    Raises:
        ValueError: It has no marks.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{metrics_table()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
