"""The page of `trainmark align`: a loss curve and its reference."""

from pathlib import Path

from trainmark.files import write_atomically
from trainmark.report.charts import Series, line_chart
from trainmark.report.html import document
from trainmark.report.markup import join, tag
from trainmark.run.alignment import Alignment, curve_file, read_curve, sentence
from trainmark.run.curves import thin

PAGE_NAME = "alignment.html"


def write_page(folder: Path, reference: Path, found: Alignment) -> Path:
    """Write a page with both curves beside our curve's file; returns its path."""
    path = curve_file(folder).with_name(PAGE_NAME)
    write_atomically(path, _page(found, read_curve(folder), read_curve(reference)))
    return path


def _page(found: Alignment, ours: dict[int, float], theirs: dict[int, float]) -> str:
    our_curve, their_curve = (
        thin(sorted((float(step), loss) for step, loss in losses.items()))
        for losses in (ours, theirs)
    )
    series = [
        Series("this run", our_curve, colour=0),
        Series(found.reference, their_curve, colour=1, dashed=True),
    ]
    chart = line_chart(series, "step", "loss")
    title = "Loss alignment"
    return document(title, join(tag("h1", title), tag("p", sentence(found)), chart))
