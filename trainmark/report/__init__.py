"""Results for people: the HTML page, the comparison of two runs, the published tables.

reports.py          from folders of runs to pages, tables and comparisons
html.py             the page; sections.py and training.py: its parts; charts.py and markup.py: SVG
                    and HTML
assessments.py      how good predictions are, as tables; predictions.py: on the page
forecasts.py        what was predicted beside what was measured
tables.py           the published form; published.py: rows of published systems;
                    like.py and nvidia.py: the tables of their pages; listing.py: all of them
formats.py          tables as Markdown, CSV and JSON; repeats.py: histograms of repeats
comparison.py       two results side by side; fields.py: their configurations;
                    paired.py: their scores, row by row
board.py            what `trainmark board` shows: results, changes; board_page.py: its page
alignment_page.py   the page of `trainmark align`; sweep_page.py: that of `trainmark sweep`
"""
