"""Tests of ``kairos strategies show --checkpoint``: snapshots, checkpoints between them, and other training loops."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kairos.strategy_file import parse_strategy_csv
from marks import mark_long
from training_case import experiment, make_latents, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Folders of two runs with T = 100: ``adaptive+min_snr``, and ``loss_rms+edm2`` with a checkpoint at step 30."""
    latents = make_latents(tmp_path_factory.mktemp("data"))
    quick = {"name": "adaptive", "frequency": 2, "feature_timesteps": 20, "lr": 0.02}
    smoothed = {"name": "loss_rms", "start": 5, "frequency": 5}
    methods = {
        "adaptive": {"sampler": quick, "weighting": "min_snr"},
        "smoothed": {"sampler": smoothed, "weighting": {"name": "edm2", "lr": 0.1}},
    }
    plain = experiment(methods, diffusion__process={"name": "discrete", "timesteps": 100, "schedule": "cosine"})
    folders = {method: tmp_path_factory.mktemp("trained") / method for method in methods}
    for method, folder in folders.items():
        train(plain, method, 0, folder, latents, [0, 40])
    return folders


def checkpoint_at_30(folder: Path) -> Path:
    """Return the checkpoint at step 30, where the run has no snapshot."""
    (path,) = folder.glob(".state/*/checkpoints/0000030.ckpt")
    return path


@pytest.mark.parametrize("method", ["adaptive", "smoothed"])
def test_the_recorded_table_of_a_snapshot_is_shown(kairos_strategies, trained, method):
    folder = trained[method]
    last = folder / "snapshots" / "0000040"
    written = (last / "strategy.csv").read_text()
    for path in (folder, last, folder / "checkpoint.pt"):
        assert kairos_strategies("show", "--checkpoint", path, "--format", "csv") == (0, written, "")
    first = kairos_strategies("show", "--checkpoint", folder / "snapshots" / "0000000", "--format", "csv")[1]
    before, after = parse_strategy_csv(first), parse_strategy_csv(written)
    assert abs(before["p"] - after["p"]).sum() > 0.01
    _, out, _ = kairos_strategies("show", "--checkpoint", folder)
    assert "after 40 steps" in out and "cosine schedule, T = 100, prediction" in out
    assert ("differs between images" in out) == (method == "adaptive")


def test_a_checkpoint_between_snapshots_is_loaded(kairos_strategies, trained):
    from kairos.training import checkpoint
    from kairos_timesteps import Strategy

    path = checkpoint_at_30(trained["smoothed"])
    status, out, err = kairos_strategies("show", "loss_rms+edm2", "--checkpoint", path, "--format", "csv")
    assert (status, err) == (0, "")
    columns = parse_strategy_csv(out)
    strategy = Strategy(
        "loss_rms+edm2", "cosine", timesteps=100, sampler={"start": 5, "frequency": 5}, weighting={"lr": 0.1}
    )
    strategy.load_state_dict(checkpoint.read(path)["strategy"])
    assert all(np.array_equal(columns[name], column) for name, column in strategy.table().items())
    at_end = parse_strategy_csv((trained["smoothed"] / "snapshots" / "0000040" / "strategy.csv").read_text())
    assert (columns["p"] != at_end["p"]).any() and (columns["w"] != at_end["w"]).any()
    assert np.ptp(columns["p"]) > 0

    status, _, err = kairos_strategies("show", "--checkpoint", checkpoint_at_30(trained["adaptive"]))
    assert status == 1 and "differs between images" in err and "snapshot" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speed"], ["'speed'", "adaptive+min_snr"]),
        (["adaptive+p2"], ["'adaptive+p2'", "adaptive+min_snr"]),
        (["min_snr"], ["'min_snr'", "adaptive+min_snr"]),
        (["--schedule", "cosine", "--set", "k=5"], ["--schedule, --set", "omit it"]),
    ],
)
def test_arguments_that_contradict_a_checkpoint_are_rejected(kairos_strategies, trained, arguments, words):
    status, _, err = kairos_strategies("show", *arguments, "--checkpoint", trained["adaptive"])
    assert status == 2 and all(word in err for word in words), err
    assert kairos_strategies("show", "adaptive", "--checkpoint", trained["adaptive"])[0] == 0


@pytest.mark.parametrize(
    ("process", "words"),
    mark_long([("edm", "sigma_max=80"), ("flow", "shift=1"), ("vp", "prediction epsilon")], [("edm", "sigma_max=80")]),
)
def test_snapshots_and_checkpoints_of_any_process_are_shown(kairos_strategies, capsys, tmp_path, process, words):
    methods = {"method": {"sampler": {"name": "loss_rms", "start": 5}, "weighting": "edm2"}}
    plain = experiment(methods, diffusion__process=process)
    latents = make_latents(tmp_path / "data")
    train(plain, "method", 0, tmp_path / "trained", latents, [0, 40])
    capsys.readouterr()
    written = (tmp_path / "trained" / "snapshots" / "0000040" / "strategy.csv").read_text()
    assert kairos_strategies("show", "--checkpoint", tmp_path / "trained", "--format", "csv") == (0, written, "")
    status, out, err = kairos_strategies("show", "--checkpoint", checkpoint_at_30(tmp_path / "trained"))
    assert (status, err) == (0, "") and "after 30 steps" in out and f"process    {process}: " in out and words in out
    assert "null" not in out.split("process ")[1]
    status, _, err = kairos_strategies("show", "--process", process, "--checkpoint", tmp_path / "trained")
    assert status == 2 and "--process: not allowed with --checkpoint" in err


def test_damaged_and_missing_checkpoints_are_rejected(kairos_strategies, trained, tmp_path):
    copy = shutil.copytree(trained["adaptive"] / "snapshots" / "0000040", tmp_path / "copy")
    table_file = copy / "strategy.csv"
    table_file.write_text(table_file.read_text().replace("\n1,", "\n1,1"))
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(checkpoint_at_30(trained["smoothed"]).read_bytes()[:-10])
    for path, word in ((copy, "damaged"), (tmp_path / "text.pt", "not a checkpoint"), (truncated, "damaged"),
                        (tmp_path / "empty", "no checkpoint"), (tmp_path / "none", "no checkpoint")):  # fmt: skip
        status, out, err = kairos_strategies("show", "--checkpoint", path)
        assert status == 1 and not out and word in err and str(path) in err, err


def test_a_checkpoint_of_another_training_loop_is_loaded(kairos_strategies, tmp_path):
    import torch

    from kairos_timesteps import Strategy

    strategy = Strategy("loss_second_moment+p2", timesteps=10, sampler={"history": 1}, weighting={"gamma": 2.0})
    x0 = torch.randn(64, 1, 4, 4)
    for _ in range(20):
        draw = strategy.draw(x0)
        strategy.loss(draw, 1.0 + draw.t.float())
        with strategy.observe(draw):
            pass
    torch.save({"model": {}, "strategy": strategy.state_dict()}, tmp_path / "whole.pt")
    torch.save(strategy.state_dict(), tmp_path / "alone.pt")
    torch.save({"model": {}}, tmp_path / "none.pt")
    names = ["loss_second_moment+p2", "--set", "gamma=2", "--set", "history=1", "--timesteps", 10]
    for file in ("whole.pt", "alone.pt"):
        status, out, err = kairos_strategies("show", *names, "--checkpoint", tmp_path / file, "--format", "csv")
        assert (status, err) == (0, "")
        columns = parse_strategy_csv(out)
        assert all(np.array_equal(columns[name], column) for name, column in strategy.table().items())
        assert (np.diff(columns["p"]) > 0).all()
    assert "after 20 steps" in kairos_strategies("show", *names, "--checkpoint", tmp_path / "alone.pt")[1]
    for arguments, file, word in (
        (["gradient_norm", "--timesteps", 10], "whole.pt", "does not contain the state of gradient_norm"),
        (["loss_second_moment", "--set", "history=1"], "whole.pt", "does not contain the state"),
        (names, "none.pt", "no Strategy.state_dict()"),
    ):
        status, out, err = kairos_strategies("show", *arguments, "--checkpoint", tmp_path / file)
        assert status == 1 and not out and word in err, err
