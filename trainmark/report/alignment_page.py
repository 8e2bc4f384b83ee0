"""The page of `trainmark align`: a loss curve and its reference."""

from importlib import resources
from pathlib import Path

from trainmark.files import write_atomically
from trainmark.report.charts import Series, line_chart
from trainmark.report.markup import Markup, tag
from trainmark.run.alignment import Alignment, curve_file, read_curve, sentence
from trainmark.run.curves import thin

PAGE_NAME = "alignment.html"


def write_page(folder: Path, reference: Path, found: Alignment) -> Path:
    """Draw both curves beside ours."""
    path = curve_file(folder).with_name(PAGE_NAME)
    write_atomically(path, _page(found, read_curve(folder), read_curve(reference)))
    return path


def _page(found: Alignment, ours: dict[int, float], theirs: dict[int, float]) -> str:
    chart = line_chart(
        [
            Series("this run", thin(sorted((float(s), y) for s, y in ours.items())), colour=0),
            Series(
                found.reference,
                thin(sorted((float(s), y) for s, y in theirs.items())),
                colour=1,
                dashed=True,
            ),
        ],
        "step",
        "loss",
    )
    style = Markup(resources.files(__package__).joinpath("style.css").read_text())
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "Loss alignment · Trainmark"),
        tag("style", style),
    )
    body = tag("body", tag("main", tag("h1", "Loss alignment"), tag("p", sentence(found)), chart))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
