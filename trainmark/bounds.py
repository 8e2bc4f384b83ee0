"""Types of numbers that know their bounds: `Count` is at least 1, `Share` lies in [0, 1).

A field has such a type, and flags, TOML and JSON are all held to it (`validation.problems`).
Infinity and NaN are never meant, and JSON has no words for them.
"""

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

MOST = 10**15
"""Of anything that is counted: more than any machine holds, and products of two of them with a few
bytes each can be told from it before they are beyond 63 bits."""

Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
"""A count that may be 0."""
Width = Annotated[int, Ge(1), Le(2**24)]
"""The width of a layer: a matrix of two such widths can still be described."""
Layers = Annotated[int, Ge(1), Le(10_000)]
"""Parts that are built one by one."""
Repeats = Annotated[int, Ge(1), Le(1000)]
"""Runs that are made one after the other."""
Ids = Annotated[int, Ge(1), Le(2**31)]
"""The size of a vocabulary: ids are stored in 32 bits."""
Examples = Annotated[int, Ge(1), Le(10**7)]
"""Generated ones that are all made, and held, at once."""
Seed = Annotated[int, Ge(0), Lt(2**63)]

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
NotNegative = Annotated[float, Ge(0), Lt(math.inf)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Lt(1)]
Part = Annotated[float, Ge(0), Le(1)]
"""A share that may be the whole."""
