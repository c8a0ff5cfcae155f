"""Ranks with equal samples, as in tensor, context and pipeline parallelism: equal draws, each sample counts once."""

import pytest
import torch

import rank_groups
from specifications import Specification
from test_ranks import assert_close

SMALL = {"frequency": 1, "start": 1}
POLICY = {"frequency": 1, "queue": 3, "selected": 2, "feature_timesteps": 5, "width": 8}
SPECIFICATIONS = [
    Specification({"name": "uniform", "points": "stratified"}),
    Specification({"name": "speed_official"}),
    Specification({"name": "loss_rms", **SMALL}),
    Specification({"name": "loss_second_moment", "history": 1}, timesteps=10),
    Specification({"name": "info_rate", **SMALL}),
    Specification({"name": "gradient_norm", "bins": 2, **SMALL}),
    Specification({"name": "first_order", "bins": 2, **SMALL}),
    Specification({"name": "adaptive", **POLICY}),
    Specification({"name": "loss_rms", **SMALL}, {"name": "edm2", "channels": 8}),
    Specification({"name": "uniform"}, {"name": "coarse_to_fine"}),
]


@pytest.mark.timeout(180)
def test_four_ranks_in_a_mesh_equal_one_process(tmp_path):
    in_mesh = rank_groups.run(rank_groups.train_in_mesh, tmp_path, rank_groups.RANKS, SPECIFICATIONS)
    for number, specification in enumerate(SPECIFICATIONS):
        for mode in ("group", "mesh", "micro-batches"):
            micro_batches = 2 if mode == "micro-batches" else 1
            alone = rank_groups.train(specification, half=None, micro_batches=micro_batches)
            for rank, results in enumerate(in_mesh):
                with rank_groups.case(f"{specification}, {mode}, rank {rank}"):
                    result, count, half = results[mode][number], 4 // micro_batches, rank // 2
                    rows = slice(count * half, count * half + count) if mode == "group" else slice(half, None, 2)
                    assert torch.equal(result["t"], alone["t"][:, rows]), "the timesteps differ"
                    assert_close(result["state"], alone["state"])
