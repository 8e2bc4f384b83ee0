"""The embedded engine: runs the phases that the package's docstring describes."""

import importlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from trainmark import checksums, files, progress
from trainmark.clickdata import identity
from trainmark.clicklog.arrays import shuffle
from trainmark.clicklog.engine import numbers, parse_phase, split_binary, summary, vocabulary
from trainmark.clicklog.engine.arrange import Field, TrainRows, write_in_order, write_train
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.fields import CategoricalField, LabelField, NumericalField
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.numbers import BinField, FittedNumber, FittedNumbers, NumbersField
from trainmark.clicklog.engine.splits import Split, SplitRule
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.sources.source import BadRows, Source
from trainmark.errors import InputError
from trainmark.formatting import readable_size

VOCABULARY = "vocabulary"
NUMBERS = "numbers"
"""Name of the record of what the numerical columns were fitted to."""
BAD_ROWS = "bad_rows.txt"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to prepare, and how."""

    source: Source
    output: Path
    rules: Sequence[Rules]
    """One per categorical column."""
    split: SplitRule
    seed: int = 0
    bad_rows: BadRows = "stop"
    vocabulary_from: Literal["all", "train"] = "all"
    vocabulary: Path | None = None
    """Folder with vocabularies to use instead of building them."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For feature_spec.yaml and prepare.json."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"--seed is {self.seed}; 0 or more is expected.")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, for prepare.json: as it was before the work."""
        return {
            **self.source.settings(),
            "frequency_threshold": _one_if_all_alike([rule.threshold for rule in self.rules]),
            "max_rows": _one_if_all_alike([rule.max_rows for rule in self.rules]),
            **self.split.settings(),
            "vocabulary_from": self.vocabulary_from,
            "vocabulary": str(self.vocabulary) if self.vocabulary else None,
            "bad_rows": self.bad_rows,
            "seed": self.seed,
        }


def _one_if_all_alike(of_columns: list[Any]) -> Any:
    return of_columns[0] if len(set(of_columns)) == 1 else of_columns


def prepare(job: Job, limits: Limits) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it.

    Returns:
        Seconds of each phase that ran.
    """
    work = Work(job.output)
    if files.is_finished(job.output, MANIFEST, job.settings):
        print(f"{job.output} already holds this dataset; nothing to do.{_newer_input(job)}")
        work.remove()  # which a crash may have left
        return {}
    with work.opened():
        return EmbeddedEngine(job, limits, work).run()


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

    def run(self) -> dict[str, float]:
        with self._phase("parse"):
            store, rows_per_file = self._parse()
        try:
            splits = self.job.split.apply(rows_per_file)
        except InputError:
            self.work.remove()  # nothing can come of it
            raise
        with self._phase("encode"):
            fitted, columns = self._encode(store, splits)
        with self._phase("finish"):
            self._finish(store, splits, fitted, columns)
        return self.seconds

    @contextmanager
    def _phase(self, name: str) -> Any:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    # --- phase 1

    def _parse(self) -> tuple[Store, list[int]]:
        job, source = self.job, self.job.source
        sizes = source.sizes()
        rows = int(sum(sizes) / source.bytes_per_row())
        # Another way with bad rows may go on with the blocks that have none.
        settings = {key: value for key, value in job.settings.items() if key != "bad_rows"}
        if source.schema.numbers:
            settings["stored_numbers"] = "float64"  # an earlier version stored them transformed
        facts = self.work.agree(settings, {"bits": shuffle.bucket_bits(rows)}, source.files)
        self._check_disk(rows)
        done = parse_phase.finished_blocks(self.work, job.bad_rows)
        with progress.bytes_bar("Reading", sum(sizes)) as advance:
            if done:
                stop = done[-1].stop
                advance(sum(sizes[: stop.file]) + stop.offset)
            parser = parse_phase.Parser(
                source,
                self.work,
                done,
                seed=job.seed,
                bits=facts["bits"],
                bad_rows=job.bad_rows,
                piece_bytes=self.limits.piece_bytes,
                advance=advance,
            )
            with ThreadPoolExecutor(1) as aside:
                # Needed soon, and loading it costs a quarter of a second.
                aside.submit(importlib.import_module, "pyarrow.parquet")
                records = parser.run(self.limits.threads)
        for number, column in enumerate(source.schema.categorical):
            if column.kind == "string":
                from trainmark.clicklog.arrays import strings

                strings.intern(self.work.blocks, [record.index for record in records], number)
        store = Store(self.work.blocks, source.schema, records, job.seed, facts["bits"])
        return store, parse_phase.rows_per_file(records, len(sizes))

    def _check_disk(self, rows: int) -> None:
        """Say how much disk the run needs, and stop now if that is not there."""
        schema = self.job.source.schema
        number_bytes, out_number_bytes = (8, 4) if schema.numbers else (2, 2)
        row_bytes = (
            1
            + number_bytes * schema.num_numerical
            + sum(
                8 if column.kind in ("uint64", "int64", "float64") else 4
                for column in schema.categorical
            )
        )
        out_bytes = 1 + out_number_bytes * schema.num_numerical + 4 * len(schema.categorical)
        needed = rows * (row_bytes + out_bytes + 4)
        there = sum(p.stat().st_size for p in self.work.folder.rglob("*") if p.is_file())
        free = shutil.disk_usage(self.work.folder).free
        progress.say(
            f"about {rows:,} rows; needs about {readable_size(needed)} of disk while it works, "
            f"of which {readable_size(rows * out_bytes)} stay; {readable_size(free)} are free"
        )
        if needed - there > free:
            raise InputError(
                f"{self.job.output} needs about {readable_size(needed)} of disk while it is made; "
                f"{readable_size(free)} are free. Free some, or choose another --output."
            )

    # --- phase 2

    def _encode(
        self, store: Store, splits: Sequence[Split]
    ) -> tuple[FittedNumbers, dict[str, dict[str, Any]]]:
        """Write every column; how its numbers were read, and what is worth knowing of each."""
        dataset = self.work.dataset
        for name in (*(split.name for split in splits), VOCABULARY):
            (dataset / name).mkdir(parents=True, exist_ok=True)
        memory = self.limits.memory // self.limits.threads
        train = TrainRows(store, splits[0].stop, self.work.folder / "order.bin")
        finished = {record["name"]: record for record in self.work.column_log.keep(self._intact)}
        if store.schema.numbers and NUMBERS not in finished:
            if splits[0].rows:
                train.write_order(memory)
            finished[NUMBERS] = self._fit(store, train, memory)
        fitted = FittedNumbers.from_json(
            finished.pop(NUMBERS)["facts"] if store.schema.numbers else {}
        )
        tasks = self._tasks(store, splits, train, memory, fitted)
        left = [name for name in tasks if name not in finished]
        total = store.rows * len(tasks)
        with progress.rows_bar("Writing", total) as advance:
            advance(store.rows * len(finished))
            if left and splits[0].rows:
                train.write_order(memory)

            def work(name: str) -> dict[str, Any]:
                record = {"name": name} | tasks[name]()
                self.work.column_log.append(record)
                advance(store.rows)
                return record

            with ThreadPoolExecutor(self.limits.threads) as pool:
                records = list(pool.map(work, left))
        finished |= {record["name"]: record for record in records}
        return fitted, {name: finished[name]["facts"] for name in tasks}

    def _fit(self, store: Store, train: TrainRows, memory: int) -> dict[str, Any]:
        """Find out what becomes of the numerical columns; the record of that."""

        def fit(number: int) -> FittedNumber:
            return numbers.fit(store, train, number, memory)

        with ThreadPoolExecutor(self.limits.threads) as pool:
            fitted = FittedNumbers(list(pool.map(fit, range(len(store.schema.numbers)))))
        fitted.check_names([column.name for column in store.schema.categorical])
        record = {"name": NUMBERS, "files": {}, "facts": fitted.to_json()}
        self.work.column_log.append(record)
        return record

    def _intact(self, record: dict[str, Any]) -> bool:
        files = record["files"].items()
        return all(checksums.matches(self.work.dataset / name, check) for name, check in files)

    def _tasks(
        self,
        store: Store,
        splits: Sequence[Split],
        train: TrainRows,
        memory: int,
        fitted: FittedNumbers,
    ) -> dict[str, Callable[[], dict[str, Any]]]:
        """What is to be written, by name; the largest first, so that no thread ends up alone."""

        def write(field: Field, file: str, of_splits: Sequence[Split] = splits) -> dict[str, Any]:
            files = {}
            for split in of_splits:
                path = self.work.dataset / split.name / file
                if not split.rows:
                    path.touch()
                    check = checksums.Checksum()
                elif split.name == "train":
                    check = write_train(train, field, path, memory * 2 // 5)
                else:
                    check = write_in_order(store, split, field, path, memory * 2 // 5)
                files[f"{split.name}/{file}"] = check.value()
            return files

        def numerical() -> dict[str, Any]:
            field = NumbersField(store, fitted) if store.schema.numbers else NumericalField(store)
            return {"files": write(field, "numerical.bin"), "facts": {}}

        def bins(column: int, number: int, fitted_number: FittedNumber) -> dict[str, Any]:
            name = f"{VOCABULARY}/cat_{column}.parquet"
            path = self.work.dataset / name
            if self.job.vocabulary is None:
                numbers.write_bins(fitted_number, path)
            else:
                shutil.copyfile(self.job.vocabulary / path.name, path)
            lower_ends = numbers.read_bins(path)
            files = write(BinField(store, number, lower_ends), f"cat_{column}.bin")
            facts = {
                "distinct": len(lower_ends),
                "kept": len(lower_ends),
                "cardinality": len(lower_ends) + 1,
                "missing": fitted_number.facts["missing"],
                "rare": 0,
                "digest": identity.digest(path),
            }
            return {"files": files | {name: checksums.of_file(path)}, "facts": facts}

        def label() -> dict[str, Any]:
            files, clicks = dict[str, Any](), dict[str, int]()
            for split in splits:
                field = LabelField(store)
                files |= write(field, "label.bin", [split])
                clicks[split.name] = field.clicks
            return {"files": files, "facts": {"clicks": clicks}}

        def categorical(column: int) -> dict[str, Any]:
            rules = self.job.rules[column]
            reader = ColumnReader(store, column, rules.value_modulus)
            name = f"{VOCABULARY}/cat_{column}.parquet"
            path = self.work.dataset / name
            if self.job.vocabulary is None:
                stop = store.rows if self.job.vocabulary_from == "all" else splits[0].stop
                sizes = vocabulary.build(reader, rules, stop, memory, path)
            else:
                shutil.copyfile(self.job.vocabulary / path.name, path)
                sizes = vocabulary.read_sizes(path)
            cardinality = rules.cardinality(sizes.kept)
            known = Vocabulary(path, reader, memory // 2)
            field = CategoricalField(reader, known, cardinality, SpecialIds.of(known, rules))
            files = write(field, f"cat_{column}.bin")
            facts = {
                "distinct": sizes.distinct,
                "kept": sizes.kept,
                "cardinality": cardinality,
                "missing": reader.missing(),
                "rare": field.rare,
                "digest": identity.digest(path),
            }
            return {"files": files | {name: checksums.of_file(path)}, "facts": facts}

        stored = [
            sum(record.columns[column].width * record.rows for record in store.records)
            for column in range(len(store.schema.categorical))
        ]
        by_size = sorted(range(len(stored)), key=lambda column: -stored[column])
        tasks: dict[str, Callable[[], dict[str, Any]]] = {}
        if self._numerical_features(store, fitted):
            tasks["numerical"] = numerical
        for column in by_size:
            tasks[f"cat_{column}"] = lambda column=column: categorical(column)  # type: ignore[misc]
        for place, of_column in enumerate(fitted.with_bins(), start=len(stored)):
            tasks[f"cat_{place}"] = partial(bins, place, *of_column)
        return tasks | {"label": label}

    def _numerical_features(self, store: Store, fitted: FittedNumbers) -> int:
        return fitted.features() if store.schema.numbers else store.schema.num_numerical

    # --- phase 3

    def _finish(
        self,
        store: Store,
        splits: Sequence[Split],
        fitted: FittedNumbers,
        columns: Mapping[str, dict[str, Any]],
    ) -> None:
        job, dataset = self.job, self.work.dataset
        bad = sum(record.bad for record in store.records)
        if bad:
            with (dataset / BAD_ROWS).open("wb") as report:
                for record in store.records:
                    if record.bad:
                        report.write(
                            parse_phase.bad_rows_path(self.work, record.index).read_bytes()
                        )
        names = [column.name for column in store.schema.categorical]
        rules = [*job.rules[: len(names)], *(numbers.BIN_RULES for _ in fitted.with_bins())]
        names += [numbers.bin_name(column.name) for _, column in fitted.with_bins()]
        facts = [columns[f"cat_{number}"] for number in range(len(names))]
        cardinalities = [fact["cardinality"] for fact in facts]
        split_binary.write_specs(
            dataset,
            cardinalities,
            self._numerical_features(store, fitted),
            job.metadata,
            validation=any(split.name == "validation" for split in splits),
            numerical_dtype=fitted.dtype,
        )
        inputs = job.source.inputs()
        files.write_json(
            dataset / VOCABULARY / "vocabulary.json",
            # A column that an earlier version encoded, before it was killed, has no digest.
            summary.vocabulary_facts(
                rules,
                names,
                inputs and fitted.recorded(inputs),
                [fact.get("digest") for fact in facts],
            ),
        )
        manifest = summary.manifest(
            settings=job.settings,
            splits=splits,
            clicks=columns["label"]["clicks"],
            bad=bad,
            features=dict(zip(names, facts, strict=True)),
            numerical={column.name: column.facts for column in fitted.columns},
            metadata=job.metadata,
        )
        files.write_json(dataset / MANIFEST, manifest)
        written = (record["files"] for record in self.work.column_log.read())
        checksums.seal(dataset, files.SIGNED, {n: c for of in written for n, c in of.items()})
        self.work.publish()
