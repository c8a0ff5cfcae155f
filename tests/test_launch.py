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
    """Environment of a rank in this process; the first failing rank writes its number to the folder."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("KAIROS_RANKS", str(tmp_path))


class DistanceError(Exception):
    """Error that user code defines."""


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/data/igloo/images.npy"),
        KairosError("/data/gloo/latents/record.json is missing"),
        RuntimeError("PytorchStreamReader failed reading file /data/gloo/checkpoint.pt"),
        DistanceError("not finite"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_run_itself_are_reported(rank_of_a_launcher, error):
    assert launch.is_first_failure(error)


def yield_communication_errors():
    """Yield the errors of gloo and the store if the other rank is in another collective, has left, or never joined."""
    store, patience = distributed.HashStore(), timedelta(seconds=0.3)

    def connect(name, rank):
        return distributed.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, 2, patience)

    def connect_both(name):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: connect(name, rank), range(2)))

    waiting, _other = connect_both("waiting")
    abandoned = connect_both("left")[0]
    for connected in (waiting, waiting, abandoned):
        with pytest.raises(RuntimeError) as caught:
            connected.allreduce([torch.ones(3)]).wait()
        yield caught.value
    with pytest.raises(RuntimeError) as caught:
        connect("absent", 0)
    yield caught.value


def test_communication_errors_between_ranks_are_not_reported_as_first_failure(rank_of_a_launcher):
    errors = list(yield_communication_errors())
    assert len(errors) == 4
    for error in errors:
        assert not launch.is_first_failure(error), error
