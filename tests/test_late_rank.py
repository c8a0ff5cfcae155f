"""Ranks of a training run wait for each other, however long one of them takes."""

import os
import time

import pytest
import torch

import rank_groups
from kairos import ranks


def meet_late():
    """Join, read and synchronise while rank 0 exceeds the time limit of a collective; return the value read."""
    ranks.LONGEST_WAIT = 3.0  # long enough for processes on a busy machine
    is_late = os.environ["RANK"] == "0"
    if is_late:
        time.sleep(4)  # like a rank that waits for a lock
    ranks.join(2, torch.device("cpu"))
    result = ranks.call_on_rank_0(lambda: time.sleep(4) or "read")
    if is_late:
        time.sleep(4)  # like a rank that writes a checkpoint
    ranks.barrier()
    assert ranks.add([1.0]) == [2.0]
    ranks.leave()
    return result


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ranks_wait_for_a_rank_that_exceeds_the_time_limit_of_a_step(tmp_path):
    assert rank_groups.run(meet_late, tmp_path, 2, join=False) == ["read", "read"]
    assert 60 <= ranks.LONGEST_WAIT <= 600
