"""The published ways to turn a Criteo log into numbers, and how they differ.

              nvidia                   torchrec                    dlrm
    integers  ln(x + 3)                ln(x + 3)                   ln(x + 1), negative as 0
    missing   0.0                      as 0                        as 0
    ids       1, 2, ... by count       2, 3, ... by appearance     0, 1, ... by appearance
    rare      0                        1                           there are none
    missing   0                        as value 0                  as value 0
    last day  test, validation         validation, test            test, validation
    halves    first rounded down       first rounded up            first rounded up
    max-rows  id modulo N              id modulo N                 value modulo N, then ids

`nvidia` is NVIDIA's Spark preparation, `torchrec` TorchRec's npy scripts as of 2022, `dlrm` the
original of facebookresearch. Equal counts, which NVIDIA leaves in any order, go by rising value.
ln(x + 3) of an x that is not above -3 is 0.0; TorchRec writes an infinity or NaN there, which
no training survives. A value without an id where the recipe knows no rare ones (`dlrm`, possible
with a given vocabulary or one from the training days only) becomes 0.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Name = Literal["nvidia", "torchrec", "dlrm"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The rules of one published preparation."""

    name: str
    shift: int
    """Integers become ln(x + shift), 0.0 where that is not positive."""
    missing_integer: int | None
    """What a missing integer counts as; None: the result is 0.0."""
    smallest_integer: int | None = None
    """Smaller integers are taken for this."""
    order: Literal["count", "appearance"]
    """What ids go by."""
    first_id: int
    rare_id: int = 0
    missing_is_zero: bool = False
    """Whether a missing categorical value is the value 0; otherwise it has the rare id."""
    missing_is_value: bool = False
    """Whether it is a value of its own instead, which has an id if it occurs as often as others
    must."""
    threshold: int = 0
    """Default frequency threshold."""
    vocabulary_from: Literal["all", "train"] = "all"
    """Rows whose values are counted by default."""
    folds_values: bool = False
    """Whether --max-rows applies to values, not to ids."""
    test_half: Literal["first", "second"] = "first"
    """Which half of the last day is the test split."""
    rounds_up: bool = False
    """Whether the first half of an odd day is the larger one."""

    @property
    def reading(self) -> str:
        """What becomes of integers, for people."""
        return f"ln(x + {self.shift})"

    @property
    def smallest(self) -> int:
        """Smaller integers become 0.0 as this one does."""
        return 1 - self.shift

    def transform(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Integers, none of them missing, to what the model gets."""
        x = numbers.astype(np.float64)
        if self.smallest_integer is not None:
            x = np.maximum(x, self.smallest_integer)
        return np.log(np.maximum(x + self.shift, 1.0))

    @property
    def missing_number(self) -> float:
        """What the model gets for a missing integer."""
        if self.missing_integer is None:
            return 0.0
        return float(self.transform(np.array([self.missing_integer]))[0])


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="nvidia", shift=3, missing_integer=None, order="count", first_id=1, threshold=15
        ),
        Recipe(
            name="torchrec",
            shift=3,
            missing_integer=0,
            order="appearance",
            first_id=2,
            rare_id=1,
            missing_is_zero=True,
            test_half="second",
            rounds_up=True,
        ),
        Recipe(
            name="dlrm",
            shift=1,
            missing_integer=0,
            smallest_integer=0,
            order="appearance",
            first_id=0,
            missing_is_zero=True,
            folds_values=True,
            rounds_up=True,
        ),
        # Of data of any columns. That a value is missing often says more than most values do.
        Recipe(
            name="tabular",
            shift=3,
            missing_integer=None,
            order="count",
            first_id=1,
            missing_is_value=True,
            # A value of one row teaches nothing that another could use; what such values teach
            # together is given to later ones that nobody has seen yet. Values of a few rows must
            # stay: a user's few clicks say much.
            threshold=2,
            # Ids for values because held-out rows have them would make the test better than what
            # a new day brings.
            vocabulary_from="train",
        ),
    )
}
