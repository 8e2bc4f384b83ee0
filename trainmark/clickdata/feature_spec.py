"""The specification of a click-log dataset: the `feature_spec.yaml` of NVIDIA's DLRM.

Preparation writes it and training reads it. It names the features with their dtypes, says which
channel each belongs to (label, numerical, categorical), and lists for every mapping (`train`,
`test`) the binary files that hold them. Paths are relative to the folder of the YAML file.

A dataset folder looks like this; the published systems know `train` and `test` only, so the
validation split has a specification of its own, with the one mapping `validation`:

    feature_spec.yaml                train/numerical.bin  train/label.bin  train/cat_0.bin ...
                                     test/...
    feature_spec_validation.yaml     validation/...

`read` accepts any specification of this general form (other chunk types, several files per chunk,
other channels); `spec_rules.check` then says what DLRM training cannot use.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmark import checksums
from trainmark.errors import InputError, raise_all
from trainmark.files import write_atomically
from trainmark.progress import say
from trainmark.validation import load_yaml, parse

FILE_NAME = "feature_spec.yaml"
VALIDATION_FILE_NAME = "feature_spec_validation.yaml"

LABEL, NUMERICAL, CATEGORICAL = "label", "numerical", "categorical"
CHANNELS = (CATEGORICAL, NUMERICAL, LABEL)
SPLIT_BINARY = "split_binary"
CATEGORICAL_DTYPES = ("int8", "int16", "int32")
"""The types that preparation writes; other software also writes the two below."""
READABLE_DTYPES = (*CATEGORICAL_DTYPES, "uint8", "int64")
NUMERICAL_DTYPES = ("float16", "float32")
"""Published is float16; preparation writes float32 where that would lose digits."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One column of the log."""

    dtype: str | None = None
    """A numpy dtype."""
    cardinality: int | str | None = None
    """Number of ids of a categorical feature, 0 to cardinality - 1. `auto` in that of CSV files."""
    hotness: int = 1
    """Ids per example."""
    varies: bool = False
    """Whether an example may have fewer: -1 then stands for none, behind those that it has."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Features that are stored together."""

    type: str
    features: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """The four parts of the file, under their published names."""

    feature_spec: dict[str, Feature]
    source_spec: dict[str, tuple[Chunk, ...]]
    channel_spec: dict[str, tuple[str, ...]]
    metadata: dict[str, Any] = field(default_factory=dict)

    # Others keep more under keys of their own; a misspelt one is missed, or named by `check`.
    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012  (a class attribute, not a field)

    @property
    def label(self) -> str:
        return self.channel_spec[LABEL][0]

    @property
    def numerical(self) -> tuple[str, ...]:
        """Names of the numerical features, in column order of their file."""
        return self.channel_spec[NUMERICAL]

    @property
    def numerical_dtype(self) -> str:
        """The type of all numerical features; float16 where there are none."""
        return str(self.feature_spec[self.numerical[0]].dtype) if self.numerical else "float16"

    @property
    def categorical(self) -> tuple[str, ...]:
        """Names of the categorical features, in table order."""
        return self.channel_spec[CATEGORICAL]

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Rows of each embedding table, in table order."""
        return tuple(int(self.feature_spec[name].cardinality or 0) for name in self.categorical)

    @property
    def hotness(self) -> tuple[int, ...]:
        """Ids per example of each categorical feature, in table order."""
        return tuple(self.feature_spec[name].hotness for name in self.categorical)

    @property
    def varies(self) -> bool:
        """Whether an example may have fewer ids of some feature."""
        return any(self.feature_spec[name].varies for name in self.categorical)

    def files(self, mapping: str) -> dict[str, str]:
        """Feature name -> its file in `mapping`, relative to the folder of the specification."""
        return {
            name: chunk.files[0] for chunk in self.source_spec[mapping] for name in chunk.features
        }


def dtype_for(cardinality: int) -> str:
    """The narrowest integer type that the published systems use for `cardinality` ids."""
    for limit, dtype in zip((127, 32767, 2147483647), CATEGORICAL_DTYPES, strict=True):
        if cardinality < limit:
            return dtype
    raise InputError(
        f"A categorical feature has {cardinality:,} distinct ids; at most 2,147,483,646 can be "
        "stored. Raise the frequency threshold."
    )


def default_spec(
    cardinalities: Sequence[int],
    num_numerical: int,
    metadata: Mapping[str, Any] | None = None,
    hotness: Sequence[int] = (),
    numerical_dtype: str = "float16",
    varies: Sequence[bool] = (),
) -> FeatureSpec:
    """The specification that preparation writes, with the published names and file layout.

    Args:
        cardinalities: number of ids of each categorical feature.
        num_numerical: number of numerical features.
        metadata: facts to keep with the dataset.
        hotness: ids per example of each categorical feature; one each if empty.
        numerical_dtype: of all numerical features.
        varies: whether an example may have fewer ids of a categorical feature; none if empty.
    """
    numerical = tuple(f"num_{i}" for i in range(num_numerical))
    # The ".bin" is part of the feature's name: existing tools expect it.
    categorical = tuple(f"cat_{i}.bin" for i in range(len(cardinalities)))
    features = {name: Feature(dtype=numerical_dtype) for name in numerical}
    features["label"] = Feature(dtype="bool")
    hotness = hotness or (1,) * len(categorical)
    varies = varies or (False,) * len(categorical)
    for name, cardinality, hot, fewer in zip(
        categorical, cardinalities, hotness, varies, strict=True
    ):
        dtype = dtype_for(cardinality)
        features[name] = Feature(dtype=dtype, cardinality=cardinality, hotness=hot, varies=fewer)

    spec = FeatureSpec(
        feature_spec=features,
        source_spec={},
        channel_spec={CATEGORICAL: categorical, NUMERICAL: numerical, LABEL: ("label",)},
        metadata=dict(metadata or {}),
    )
    return of_mappings(spec, ("train", "test"))


def of_mappings(spec: FeatureSpec, mappings: Iterable[str]) -> FeatureSpec:
    """The same features in the files that preparation writes for other splits."""
    contents = [("numerical.bin", spec.numerical)] if spec.numerical else []
    contents += [("label.bin", (spec.label,)), *((name, (name,)) for name in spec.categorical)]
    source_spec = {
        mapping: tuple(
            Chunk(type=SPLIT_BINARY, features=names, files=(f"{mapping}/{file}",))
            for file, names in contents
        )
        for mapping in mappings
    }
    return dataclasses.replace(spec, source_spec=source_spec)


# --- reading and writing


def path_of(folder: str | Path, mapping: str = "train") -> Path:
    """The specification in the dataset `folder` that describes `mapping`."""
    return Path(folder) / (VALIDATION_FILE_NAME if mapping == "validation" else FILE_NAME)


def read(path: str | Path) -> FeatureSpec:
    """Parse a specification, given its path or that of the folder with `feature_spec.yaml`."""
    import yaml

    path = Path(path)
    if path.is_dir():
        path = path_of(path)
    if not path.is_file():
        raise InputError(
            f"{path} does not exist. Expected the specification of a dataset; "
            "`trainmark prepare` writes one."
        )
    checksums.check_file(path)
    try:
        data = load_yaml(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    # PyYAML lets errors of its scalars (an impossible date, say) and of deep nesting through.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is not readable as YAML: {reason:.300}.") from None
    if not isinstance(data, dict):
        raise InputError(
            f"{path} should hold the keys feature_spec, source_spec, channel_spec and metadata; "
            f"it holds {'nothing' if data is None else f'a {type(data).__name__}'}."
        )
    data["metadata"] = data.get("metadata") or {}  # null, where others have none
    return parse(FeatureSpec, data, source=str(path))


def write(spec: FeatureSpec, path: str | Path) -> None:
    """Write `spec`; the file appears whole or not at all."""
    import yaml

    # NVIDIA's writer ends the file with an empty line; ours does, to stay comparable byte by byte.
    text = yaml.dump(plain(spec)) + "\n"
    write_atomically(Path(path), text)


def plain(spec: FeatureSpec) -> dict[str, Any]:
    """Dictionaries and lists for YAML, without the values that say nothing."""

    def feature(f: Feature) -> dict[str, Any]:
        values = dataclasses.asdict(f)
        silent = {"dtype": None, "cardinality": None, "hotness": 1, "varies": False}
        return {key: value for key, value in values.items() if value != silent[key]}

    def chunk(c: Chunk) -> dict[str, Any]:
        return {"type": c.type, "features": list(c.features), "files": list(c.files)}

    return {
        "feature_spec": {name: feature(f) for name, f in spec.feature_spec.items()},
        "source_spec": {name: [chunk(c) for c in cs] for name, cs in spec.source_spec.items()},
        "channel_spec": {name: list(features) for name, features in spec.channel_spec.items()},
        "metadata": spec.metadata,
    }


# --- the files


def count_rows(spec: FeatureSpec, base: str | Path, mapping: str) -> int:
    """Rows of `mapping`, after checking that its files are there, whole and of equal length.

    Args:
        spec: a specification that `check` accepts.
        base: the folder of the specification.
        mapping: `train`, `test` or `validation`.
    """
    if mapping not in spec.source_spec:
        there = ", ".join(spec.source_spec) or "none"
        raise InputError(f"{base}: there is no mapping {mapping!r}; there is {there}.")
    rows: dict[Path, int] = {}
    problems: list[str] = []
    for chunk in spec.source_spec[mapping]:
        path = Path(base) / chunk.files[0]
        row_bytes = _row_bytes(spec, chunk)
        if not path.is_file():
            problems.append(f"{path} does not exist ({FILE_NAME} lists it for {mapping}).")
            continue
        size = path.stat().st_size
        if size == 0:
            problems.append(f"{path} is empty.")
        elif size % row_bytes:
            problems.append(
                f"{path} is truncated: {size:,} bytes is not a multiple of the {row_bytes} bytes "
                "that one row takes."
            )
        else:
            rows[path] = size // row_bytes
    raise_all(problems)
    return _agreed(rows, mapping)


def check_bytes(spec: FeatureSpec, base: str | Path, mapping: str) -> None:
    """Read the files of `mapping` once, if they are few enough, and refuse one that has changed."""
    names = [file for chunk in spec.source_spec[mapping] for file in chunk.files]
    size = sum((Path(base) / name).stat().st_size for name in names)
    if size > MAX_CHECKED_BYTES and (Path(base) / checksums.FILE_NAME).is_file():
        say(f"{base}: checksums are not checked now, because it is large: trainmark verify {base}")
    elif size <= MAX_CHECKED_BYTES:
        checksums.check(Path(base), names)


MAX_CHECKED_BYTES = 4 * 2**30  # a second or two


def _row_bytes(spec: FeatureSpec, chunk: Chunk) -> int:
    import numpy as np

    features = [spec.feature_spec[name] for name in chunk.features]
    return sum(np.dtype(f.dtype).itemsize * f.hotness for f in features)


def _agreed(rows: dict[Path, int], mapping: str) -> int:
    """The number of rows that all files have."""
    (usual, _), *others = Counter(rows.values()).most_common()
    if others:
        odd = [f"{path} has {n:,}" for path, n in rows.items() if n != usual]
        raise InputError(
            f"The files of {mapping} differ in length: most have {usual:,} rows, but "
            f"{', '.join(odd)}. Prepare the dataset again."
        )
    return usual
