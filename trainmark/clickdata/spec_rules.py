"""What DLRM training can use of a dataset's specification, and what is wrong with any other."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from trainmark.clickdata.feature_spec import (
    CHANNELS,
    FILE_NAME,
    LABEL,
    NUMERICAL_DTYPES,
    READABLE_DTYPES,
    SPLIT_BINARY,
    Chunk,
    Feature,
    FeatureSpec,
)
from trainmark.errors import raise_all


def check(
    spec: FeatureSpec, mappings: Sequence[str] = ("train", "test"), source: str = FILE_NAME
) -> None:
    """Raise one `InputError` that names every rule of DLRM training that `spec` breaks.

    Args:
        spec: what `read` returned.
        mappings: the mappings that must be there, and no others.
        source: the path to put before each message.
    """
    raise_all(f"{source}: {problem}" for problem in _problems(spec, mappings))


def _problems(spec: FeatureSpec, mappings: Sequence[str]) -> Iterator[str]:
    for name, feature in spec.feature_spec.items():
        yield from _dtype_problems(name, feature)
    yield from channel_problems(spec)
    # The other rules speak of channels; with missing channels they would only repeat the above.
    if set(spec.channel_spec) != set(CHANNELS):
        return
    for name in spec.categorical:
        if name in spec.feature_spec:
            yield from _categorical_problems(name, spec.feature_spec[name])
    for name in spec.numerical:
        yield from _wants_dtype(spec, name, "numerical", NUMERICAL_DTYPES)
    kinds = {spec.feature_spec[name].dtype for name in spec.numerical if name in spec.feature_spec}
    if len(kinds) > 1 and kinds <= set(NUMERICAL_DTYPES):
        yield "some numerical features are float16 and some float32; all should be of one dtype."
    for name in spec.channel_spec[LABEL]:
        yield from _wants_dtype(spec, name, "label", ("bool",))
    if set(spec.source_spec) != set(mappings):
        yield (
            f"source_spec should have exactly the mappings {_names(mappings)}; "
            f"it has {_names(spec.source_spec)}."
        )
    for mapping, chunks in spec.source_spec.items():
        yield from _mapping_problems(spec, mapping, chunks)


def _dtype_problems(name: str, feature: Feature) -> Iterator[str]:
    if feature.dtype is None:
        yield f"feature {name!r} has no dtype."
    elif _numpy_dtype(feature.dtype) is None:
        yield f"feature {name!r} has dtype {feature.dtype!r}, which numpy does not know."
    if feature.hotness < 1:
        yield f"feature {name!r} has hotness {feature.hotness}; at least 1 is expected."


def channel_problems(spec: FeatureSpec) -> Iterator[str]:
    """What is wrong with the channels: their names, and which features are in them."""
    if set(spec.channel_spec) != set(CHANNELS):
        yield (
            f"channel_spec should have exactly the channels {_names(CHANNELS)}; "
            f"it has {_names(spec.channel_spec)}."
        )
    elif len(spec.channel_spec[LABEL]) != 1:
        yield (
            "the label channel should have exactly one feature; "
            f"it has {_names(spec.channel_spec[LABEL])}."
        )
    uses = Counter(name for names in spec.channel_spec.values() for name in names)
    for name, count in uses.items():
        if count > 1:
            yield f"feature {name!r} is listed {count} times in channel_spec; once is expected."
        if name not in spec.feature_spec:
            yield f"feature {name!r} of channel_spec is not described in feature_spec."
    for name in spec.feature_spec:
        if name not in uses:
            yield f"feature {name!r} of feature_spec is in no channel."


def _categorical_problems(name: str, feature: Feature) -> Iterator[str]:
    known = _numpy_dtype(feature.dtype)
    if known is not None and known not in READABLE_DTYPES:
        yield (
            f"categorical feature {name!r} has dtype {feature.dtype}; "
            f"one of {_names(READABLE_DTYPES)} is expected."
        )
    if feature.varies and known is not None and known.startswith("u"):
        yield (
            f"categorical feature {name!r} varies in its number of ids, which -1 fills up; its "
            f"dtype {known} has no -1."
        )
    cardinality = feature.cardinality
    if not isinstance(cardinality, int):
        received = "none" if cardinality is None else repr(cardinality)
        yield f"categorical feature {name!r} needs an integer cardinality; it has {received}."
    elif cardinality < 1:
        yield f"categorical feature {name!r} has cardinality {cardinality}; 1 or more is expected."
    elif known in READABLE_DTYPES and not _fits(cardinality, known):
        yield (
            f"categorical feature {name!r} has cardinality {cardinality:,}, which does not fit "
            f"its dtype {known}."
        )


def _wants_dtype(
    spec: FeatureSpec, name: str, channel: str, expected: Sequence[str]
) -> Iterator[str]:
    feature = spec.feature_spec.get(name)
    known = _numpy_dtype(feature.dtype) if feature else None
    if feature and known is not None and known not in expected:
        wanted = " or ".join(expected)
        yield f"{channel} feature {name!r} has dtype {feature.dtype}; {wanted} is expected."


def _mapping_problems(spec: FeatureSpec, mapping: str, chunks: Sequence[Chunk]) -> Iterator[str]:
    for number, chunk in enumerate(chunks):
        where = f"source_spec {mapping}, chunk {number}"
        for problem in _chunk_problems(spec, chunk):
            yield f"{where}: {problem}"
    uses = Counter(name for chunk in chunks for name in chunk.features)
    for name, count in uses.items():
        if count > 1:
            yield f"source_spec {mapping} holds feature {name!r} {count} times; once is expected."
    missing = [name for name in spec.feature_spec if name not in uses]
    if missing:
        yield f"source_spec {mapping} lacks {_names(missing)}."


def _chunk_problems(spec: FeatureSpec, chunk: Chunk) -> Iterator[str]:
    if chunk.type != SPLIT_BINARY:
        yield f"type {chunk.type!r} is not trainable; {SPLIT_BINARY} is expected."
    if len(chunk.files) != 1:
        yield f"exactly one file is expected; it has {_names(chunk.files)}."
    if not chunk.features:
        yield "it has no features; at least one is expected."
    for name in chunk.features:
        if name not in spec.feature_spec:
            yield f"feature {name!r} is not described in feature_spec."
    names = set(chunk.features)
    if names & set(spec.categorical) and len(chunk.features) != 1:
        yield f"a categorical feature must be alone in its file; it has {_names(chunk.features)}."
    if names & set(spec.channel_spec[LABEL]) and len(chunk.features) != 1:
        yield f"the label must be alone in its file; it has {_names(chunk.features)}."
    if names & set(spec.numerical) and chunk.features != spec.numerical:
        yield (
            f"a numerical file must hold all numerical features in the order of channel_spec, "
            f"{_names(spec.numerical)}; it has {_names(chunk.features)}."
        )


def _numpy_dtype(dtype: str | None) -> str | None:
    """The dtype's canonical name (byte order named where it is foreign), or None."""
    import numpy as np

    try:
        known = np.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError, SyntaxError):
        return None
    return known and (known.name if known.isnative else known.str)


def _fits(cardinality: int, dtype: str) -> bool:
    import numpy as np

    return cardinality - 1 <= int(np.iinfo(dtype).max)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
