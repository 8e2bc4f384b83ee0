"""Results for people: the HTML page, the comparison of two runs, the published tables.

reports.py              from folders of runs to pages, tables and comparisons

Pages
    html.py             the page of `trainmark report`
    sections.py         its parts; training.py: curves; predictions.py: how good predictions are;
                        forecasts.py: predicted beside measured
    charts.py           charts as SVG; markup.py: HTML that is always escaped
    board.py            what `trainmark board` shows; board_page.py: its page;
                        board_drawing.py: what its script draws
    alignment_page.py   the page of `trainmark align`
    sweep_page.py       the page of `trainmark sweep`

Tables
    tables.py           results in the published form; formats.py: as Markdown, CSV and JSON
    published.py        the rows of published systems; listing.py: all of them
    like.py             our results in the tables of published pages; nvidia.py: those of NVIDIA
    repeats.py          histograms of repeats
    assessments.py      how good predictions are
    comparison.py       two results side by side; fields.py: their configurations;
                        paired.py: their scores, row by row
"""
