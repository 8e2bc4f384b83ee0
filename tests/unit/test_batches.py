"""Global batches and their shares, against lists that are cut one sample at a time."""

import itertools

import pytest

from trainmark.training.batches import GlobalBatches, rank_shares


def cut_by_hand(samples: int, size: int, epochs: int, drops_last: bool) -> list[list[int]]:
    batches = []
    for _ in range(epochs):
        left = list(range(samples))
        while len(left) >= (size if drops_last else 1):
            batches.append(left[:size])
            del left[:size]
    return batches


@pytest.mark.parametrize("drops_last", [True, False])
@pytest.mark.parametrize(("samples", "size"), [(12, 4), (13, 4), (3, 4), (7, 1), (20, 7)])
def test_batches_of_all_epochs(samples: int, size: int, drops_last: bool) -> None:
    batches = GlobalBatches(samples=samples, size=size, epochs=3, drops_last=drops_last)
    found = list(batches.after(0))
    expected = cut_by_hand(samples, size, 3, drops_last)
    assert [list(range(batch.start, batch.stop)) for batch in found] == expected
    assert batches.per_epoch * 3 == len(expected)
    assert [b.position for b in found] == list(itertools.accumulate(map(len, expected)))
    assert [batches.ending_at(batch.position) for batch in found] == found
    for number, batch in enumerate(found, start=1):
        assert list(batches.after(batch.position)) == found[number:]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_the_batch_in_order_and_nearly_equal(ranks: int) -> None:
    for batch in GlobalBatches(samples=31, size=7, epochs=2).after(0):
        shares = [batch.share(rank, ranks) for rank in range(ranks)]
        assert list(itertools.chain(*shares)) == list(range(batch.start, batch.stop))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert rank_shares(batch.size, ranks) == sizes
