"""Ranks of a training run wait for each other, however long one of them takes."""

import os
import time

import pytest
import torch

import rank_groups
from kairos import ranks


def meet_late():
    """Join, read and meet while rank 0 takes longer than a collective may; returns what `on_first` gives."""
    ranks.LONGEST_WAIT = 3.0  # a busy machine's processes meet within that
    late = os.environ["RANK"] == "0"
    if late:
        time.sleep(4)  # as a rank that waits for a lock
    ranks.join(2, torch.device("cpu"))
    read = ranks.on_first(lambda: time.sleep(4) or "read")
    if late:
        time.sleep(4)  # as a rank that writes a checkpoint
    ranks.meet()
    assert ranks.add([1.0]) == [2.0]
    ranks.leave()
    return read


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ranks_wait_for_one_that_takes_longer_than_a_step_may(tmp_path):
    assert rank_groups.run(meet_late, tmp_path, 2, join=False) == ["read", "read"]
    assert 60 <= ranks.LONGEST_WAIT <= 600
