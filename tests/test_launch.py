"""Several processes of one training run: which process reports why the run failed."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed

from kairos.training import launch
from kairos_timesteps.errors import KairosError


@pytest.fixture
def rank_of_a_launcher(tmp_path, monkeypatch):
    """Give this process the environment of a rank; the folder is where the first rank that fails leaves its number."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("KAIROS_RANKS", str(tmp_path))


class DistanceError(Exception):
    """An error of a user's own code."""


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/data/igloo/images.npy"),
        KairosError("/data/gloo/latents/manifest.json is missing"),
        RuntimeError("PytorchStreamReader failed reading file /data/gloo/checkpoint.pt"),
        DistanceError("not finite"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_training_itself_are_reported(rank_of_a_launcher, error):
    assert launch.is_first_failure(error)


def communication_errors():
    """Errors that gloo and the store raise where the other rank waits elsewhere, has left, or never came."""
    store, patience = distributed.HashStore(), timedelta(seconds=0.3)

    def group(name, rank):
        return distributed.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, 2, patience)

    def both(name):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: group(name, rank), range(2)))

    waiting, _other = both("waiting")
    lonely = both("left")[0]
    for connected in (waiting, waiting, lonely):
        with pytest.raises(RuntimeError) as caught:
            connected.allreduce([torch.ones(3)]).wait()
        yield caught.value
    with pytest.raises(RuntimeError) as caught:
        group("absent", 0)
    yield caught.value


def test_errors_of_the_communication_between_ranks_are_left_to_their_cause(rank_of_a_launcher):
    errors = list(communication_errors())
    assert len(errors) == 4
    for error in errors:
        assert not launch.is_first_failure(error), error
