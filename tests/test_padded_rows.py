"""Rows side by side: each in a row of its own, padded behind."""

import pytest
import torch
from packed import collate
from tiny import rows, segment

from condensegrpo.algorithms.packing import lay_out
from condensegrpo.core.errors import LearnerError
from condensegrpo.learner.micro_batches import pad_rows


def test_each_row_lies_in_a_row_of_its_own_with_padding_behind_it() -> None:
    batch = collate([segment([8, 9], [1]), segment([5, 6, 7], [2])])
    found = pad_rows(batch.token_ids, batch.position_ids, torch.arange(5))
    assert found.token_ids.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert found.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found.source.tolist() == [0, 1, 3, 4, 5]


def test_every_packed_token_is_found_again() -> None:
    batch = collate(rows(9))
    found = pad_rows(batch.token_ids, batch.position_ids, torch.arange(batch.token_ids.numel()))
    assert torch.equal(found.token_ids.flatten()[found.source], batch.token_ids[0])


def test_a_tree_is_refused() -> None:
    batch = lay_out([(segment([5, 6, 7], [2]), segment([5, 6, 8], [2]))])
    with pytest.raises(LearnerError, match=r"takes plain rows only .* Pack its rows with share=False"):
        pad_rows(batch.token_ids, batch.position_ids, batch.source)
