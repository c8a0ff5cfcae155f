"""A step that exceeds the memory of the device is rejected with the micro-batch that fits."""

from contextlib import nullcontext

import pytest
import torch

from kairos.models.dit import DiT
from kairos_timesteps import optimizers
from kairos_timesteps.errors import KairosError
from training_case import experiment, make_latents, train


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("capacity", "microbatch", "message"),
    [
        (
            5,
            None,
            "batch_size: got 16: out of memory on cpu at step 1; allowed: training.microbatch: 4 keeps the batch",
        ),
        (5, 6, "microbatch: got 6: out of memory on cpu at step 1; allowed: training.microbatch: 4 "),
        (4, 4, None),
        (0, None, "allowed: a smaller model: "),
    ],
)
def test_the_error_reports_the_largest_microbatch_that_fits(
    latents, tmp_path, monkeypatch, capacity, microbatch, message
):
    """The network accepts at most `capacity` images; a run with the reported micro-batch completes."""
    forward = DiT.forward

    def limited(self, x, t, conditions):
        if len(x) > capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, t, conditions)

    monkeypatch.setattr(DiT, "forward", limited)
    plain = experiment(training__microbatch=microbatch, training__milestones=[2])
    with pytest.raises(KairosError) if message else nullcontext() as raised:
        train(plain, "uniform", 0, tmp_path / "out", latents, [0, 2])
    assert message is None or message in str(raised.value)


@pytest.mark.long
def test_memory_outside_of_the_forward_passes_is_reported_separately(latents, tmp_path, monkeypatch):
    """If the optimizer or the sampler runs out of memory, smaller passes do not help."""
    monkeypatch.setattr(optimizers.Adam, "step", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("")))
    with pytest.raises(KairosError, match="a pass of 16 images alone fits"):
        train(experiment(training__milestones=[2]), "uniform", 0, tmp_path / "out", latents, [0, 2])
