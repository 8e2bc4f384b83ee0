"""The embedded engine: runs the phases that the package's docstring describes."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainmark import checksums, files, progress
from trainmark.clickdata import feature_spec, vocabulary_file
from trainmark.clicklog.arrays import primitives, shuffle
from trainmark.clicklog.engine import kept, numbers, parse_phase, split_binary, summary
from trainmark.clicklog.engine.columns import numerical_features
from trainmark.clicklog.engine.division import Division, divide
from trainmark.clicklog.engine.encode_phase import Encoder
from trainmark.clicklog.engine.job import VOCABULARY, Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.numbers import FittedNumbers
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.engine.workers import Workers
from trainmark.errors import InputError
from trainmark.formatting import readable_size

BAD_ROWS = "bad_rows.txt"
STORE = 4
"""Version of what store.py writes."""

RowsCheck = Callable[[Mapping[str, int]], None]
Facts = Mapping[str, Mapping[str, Any]]
"""What is known of each categorical feature, by its name."""


def prepare(job: Job, limits: Limits, check_rows: RowsCheck | None = None) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it.

    Args:
        check_rows: called with the rows of each split as soon as they are known; may refuse them.

    Returns:
        Seconds of each phase that ran.
    """
    work = Work(job.output)
    if files.is_finished(job.output, MANIFEST, job.settings):
        print(f"{job.output} already holds this dataset; nothing to do.{_newer_input(job)}")
        work.remove()  # which a crash may have left
        return {}
    with work.opened():
        return EmbeddedEngine(job, limits, work).run(check_rows)


def _newer_input(job: Job) -> str:
    """What to say where the input may have changed: files are known by name and size."""
    made = (job.output / MANIFEST).stat().st_mtime
    newer = [path for path in job.source.files if path.exists() and path.stat().st_mtime > made]
    if not newer:
        return ""
    return f" {newer[0]} is newer: if it has changed, remove {job.output} and prepare it again."


class EmbeddedEngine:
    """One run."""

    def __init__(self, job: Job, limits: Limits, work: Work) -> None:
        self.job, self.limits, self.work = job, limits, work
        self.seconds: dict[str, float] = {}

    def run(self, check_rows: RowsCheck | None) -> dict[str, float]:
        primitives.load()  # before any process is forked
        with self._phase("parse"):
            store, rows_per_file = self._parse()
        try:
            parse_phase.check_rows(self.work, store.records)
            parse_phase.check_labels(store.records)
            division = divide(self.job.split, store, rows_per_file, self.work.folder / "splits.bin")
            if check_rows is not None:
                check_rows({split.name: split.rows for split in division.splits})
        except InputError:
            self.work.remove()  # nothing can come of it: other settings do not continue this work
            raise
        with self._phase("encode"):
            fitted, columns = Encoder(self.job, self.limits, self.work, store, division).run()
        with self._phase("finish"):
            self._finish(store, division, fitted, columns)
        return self.seconds

    @contextmanager
    def _phase(self, name: str) -> Any:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    # --- phase 1

    def _parse(self) -> tuple[Store, list[int]]:
        job, source = self.job, self.job.source
        sizes = [path.stat().st_size for path in source.files]
        rows = int(sum(sizes) / source.bytes_per_row())
        # Another way with bad rows may go on with the blocks that have none.
        settings = {key: value for key, value in job.settings.items() if key != "bad_rows"}
        settings["store"] = STORE  # another version cannot go on with its blocks
        facts = self.work.agree(settings, {"bits": shuffle.bucket_bits(rows)}, source.files)
        self._check_disk(rows)
        done = parse_phase.finished_blocks(self.work, source.bad_rows)
        whole = sum(sizes)
        unpacked = max(whole, rows * self._stored_bytes())
        piece_bytes = self.limits.piece_bytes_of(unpacked)
        parser = parse_phase.Parser(
            source,
            self.work,
            done,
            seed=job.seed,
            bits=facts["bits"],
            piece_bytes=piece_bytes,
            workers=min(self.limits.workers, -(-unpacked // piece_bytes) or 1),
            memory=self.limits.memory // 2,  # who parses a piece takes four of its size
        )
        with progress.rate_bar("Reading", whole, "MB") as advance:
            if done:
                stop = done[-1].stop
                advance(sum(sizes[: stop.file]) + stop.offset)
            records = parser.run(advance)
        self._number_strings([record.index for record in records])
        store = Store(self.work.blocks, source.schema, records, job.seed, facts["bits"])
        return store, parse_phase.rows_per_file(records, len(sizes))

    def _number_strings(self, blocks: Sequence[int]) -> None:
        """Number the strings of each column through all blocks."""
        schema = self.job.source.schema
        columns = [p[0] for p in schema.vocabularies() if schema.stored[p[0]].kind == "string"]
        if columns:
            from trainmark.clicklog.arrays import strings  # pyarrow

            with Workers(strings, min(self.limits.workers, len(columns), len(blocks))) as workers:
                workers.each(
                    0, "intern", [(self.work.blocks, blocks, column) for column in columns]
                )

    def _check_disk(self, rows: int) -> None:
        """Say how much disk the run needs, and stop now if that is not there."""
        schema = self.job.source.schema
        ids = sum(column.likely_places for column in schema.categorical)
        out_bytes = 1 + (4 if schema.numbers else 2) * schema.num_numerical + 4 * ids
        needed = rows * (self._stored_bytes() + out_bytes + 4)
        there = sum(p.stat().st_size for p in self.work.folder.rglob("*") if p.is_file())
        free = shutil.disk_usage(self.work.folder).free
        has_texts = any(column.kind == "string" for column in schema.stored)
        texts = ", and some three times the size of all distinct texts" if has_texts else ""
        progress.say(
            f"about {rows:,} rows; needs about {readable_size(needed)} of disk while it works, "
            f"of which {readable_size(rows * out_bytes)} stay{texts}; "
            f"{readable_size(free)} are free"
        )
        if needed - there > free:
            raise InputError(
                f"{self.job.output} needs about {readable_size(needed)} of disk while it is made; "
                f"{readable_size(free)} are free. Free some, or choose another --output."
            )

    def _stored_bytes(self) -> int:
        """What a row takes in the store, at most: its place, its label, its columns."""
        schema = self.job.source.schema
        wide = ("uint64", "int64", "float64")
        columns = (*schema.categorical, *schema.helpers)
        categorical = sum((8 if c.kind in wide else 4) * c.likely_places for c in columns)
        return 4 + 1 + (8 if schema.numbers else 2) * schema.num_numerical + categorical

    # --- phase 3

    def _finish(
        self,
        store: Store,
        division: Division,
        fitted: FittedNumbers,
        columns: Mapping[str, dict[str, Any]],
    ) -> None:
        job, dataset, splits = self.job, self.work.dataset, division.splits
        of_columns = [column.name for column in store.schema.categorical]
        of_bins = [numbers.bin_name(column.name) for _, column in fitted.with_bins()]
        features = {
            name: columns[f"cat_{number}"] for number, name in enumerate([*of_columns, *of_bins])
        }
        spec = feature_spec.default_spec(
            [fact["cardinality"] for fact in features.values()],
            numerical_features(store, fitted),
            job.metadata,
            hotness=[fact.get("most", 1) for fact in features.values()],
            varies=["most" in fact for fact in features.values()],
            numerical_dtype=fitted.dtype,
        )
        validates = any(split.name == "validation" for split in splits)
        split_binary.write_specs(dataset, spec, validates)
        rules = [*job.rules[: len(of_columns)], *[numbers.BIN_RULES] * len(of_bins)]
        self._write_vocabulary(features, rules, fitted)
        carried = [kept.path_of(self.work.blocks, record.index) for record in store.records]
        if carried and carried[0].exists():
            kept.join(carried, dataset / kept.FILE)
        numerical = {column.name: column.facts for column in fitted.columns}
        manifest = summary.manifest(
            settings=job.settings,
            splits=splits,
            clicks=columns["label"]["clicks"],
            bad=self._report_bad_rows(store),
            features=features,
            numerical=numerical or numbers.of_source(store),
            metadata={**job.told, **job.metadata},
        )
        files.write_json(dataset / MANIFEST, manifest)
        written = (record["files"] for record in self.work.column_log.read())
        checksums.seal(dataset, files.SIGNED, {n: c for of in written for n, c in of.items()})
        store.close()
        self.work.publish()

    def _write_vocabulary(
        self, features: Facts, rules: Sequence[Rules], fitted: FittedNumbers
    ) -> None:
        inputs = self.job.source.inputs()
        facts = summary.vocabulary_facts(
            rules,
            list(features),
            inputs and summary.with_lists(fitted.recorded(inputs), features),
            [fact["digest"] for fact in features.values()],
            self._extends(features),
        )
        files.write_json(self.work.dataset / VOCABULARY / "vocabulary.json", facts)

    def _report_bad_rows(self, store: Store) -> int:
        """Write them to a file of the dataset, if there are any; how many there are."""
        bad = [record for record in store.records if record.bad]
        if bad:
            with (self.work.dataset / BAD_ROWS).open("wb") as report:
                for record in bad:
                    path = parse_phase.bad_rows_path(self.work, record.index)
                    report.write(path.read_bytes())
        return sum(record.bad for record in bad)

    def _extends(self, features: Facts) -> dict[str, list[dict[str, Any]]]:
        """The vocabularies that each column's has grown from, the first one first."""
        if self.job.vocabulary is None:
            return {}
        rules = vocabulary_file.read(self.job.vocabulary)["columns"]
        extends = {}
        for name, fact in features.items():
            before = list(rules[name].get("extends", []))
            grown = fact.get("grown")
            if grown and grown["digest"] != fact["digest"]:
                before.append({key: grown[key] for key in ("digest", "rows")})
            extends[name] = before
        return extends
