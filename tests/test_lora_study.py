"""Tests of examples/lora_study: the runner on images that the test writes, resume, and statistics."""

import io
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

pytest.importorskip("peft", reason="examples/lora_study/requirements.txt is not installed")
pytestmark = pytest.mark.trainers  # .ci/trainers installs peft
FOLDER = Path(__file__).parent.parent / "examples/lora_study"
SMALL_SETTING = """
import torch
from fashion_mnist import FashionMnist

from kairos import models
from kairos.models.settings import BACKBONES


class Small(FashionMnist):
    pool, samples = 12, 18

    def load_network(self):
        torch.manual_seed(0)
        options = {"name": "dit", "patch": 8, "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]}
        classes = {"class": {"kind": "class", "num_classes": 10}}
        network = models.build(BACKBONES.select(options), (1, 16, 16), classes).eval()
        for parameter in network.parameters():  # a new network's last layer is 0: the blocks change nothing
            torch.nn.init.normal_(parameter, std=0.2)
        return network
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Module of the runner, in a folder with prepared images and a small setting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "small_setting.py").write_text(SMALL_SETTING, encoding="utf-8")
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        labels = np.arange(300) % 10
        pixels = (random.random((300, 28, 28)) * 100 + 15 * labels[:, None, None]).astype(np.uint8)
        cells = []
        for image in pixels:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "png")
            cells.append({"bytes": buffer.getvalue(), "path": None})
        pd.DataFrame({"image": cells, "label": labels}).to_parquet(tmp_path / f"{split}-0.parquet")
    import prepare
    import study

    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path), "--steps", "2"])
    prepare.main()
    yield study
    for name in ("prepare", "study", "finetune", "measure", "evaluate", "fashion_mnist", "small_setting"):
        sys.modules.pop(name, None)


@pytest.mark.long
@pytest.mark.nightly
def test_rounds_resume_after_a_kill_with_equal_rows_and_end_in_tables(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(study.SEEDS, "judge", range(10, 15))
    options = ["--setting", "small_setting:Small", "--images", "4", "--steps", "2", "--out", str(tmp_path / "results")]
    options += ["--strategies", "uniform", "coarse_to_fine"]
    one_task = [*options, "--tasks", "subject"]
    with pytest.raises(SystemExit, match="uniform, subject, 4 images: no rate"):
        study.main(["judge", *one_task])
    study.main(["base", *options])
    study.main(["tune", *one_task])
    tuned = tmp_path / "results/tune.csv"
    rows = study.read_rows(tuned)
    assert len(rows) == 2 * 3 * 2  # strategies, rates, seeds
    lines = tuned.read_text(encoding="utf-8").splitlines(keepends=True)
    tuned.write_text("".join(lines[:-2]) + lines[-2][:40], encoding="utf-8")  # killed while it wrote the last but one
    study.main(["tune", *one_task])
    measures = [column for column in study.COLUMNS if not column.endswith("_seconds")]
    pd.testing.assert_frame_equal(study.read_rows(tuned)[measures], rows[measures])
    (best, _), *_ = sorted(
        rows[rows["strategy"] == "uniform"].groupby("rate")["distance"].prod().items(), key=lambda pair: pair[1]
    )
    assert study.select_rates(rows)["subject", 4, "uniform"] == best
    study.main(["judge", *one_task, "--processes", "2"])
    assert len(study.read_rows(tmp_path / "results/judge.csv")) == 2 * 5
    capsys.readouterr()
    import evaluate

    for what in ("rates", "power", "table", "levels"):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", what, "--results", str(tmp_path / "results")])
        evaluate.main()
        assert "| coarse_to_fine |" in capsys.readouterr().out or what == "power"


def test_only_lora_is_trained_and_the_loss_of_its_images_falls(study):
    setting = study.load_setting("small_setting:Small")
    from finetune import STRATEGIES, finetune
    from measure import level_losses

    base, data = setting.load_network(), setting.training_data("subject", 4, 0)
    network = finetune(setting, STRATEGIES["uniform"], data, 3e-2, 40, 8, 0)
    trained = {name.replace(".base_layer", ""): value for name, value in network.state_dict().items()}
    for name, value in base.state_dict().items():
        assert trained[name].equal(value), name
    assert sum(level_losses(setting, network, data)) < sum(level_losses(setting, base, data))


def test_paired_ratios_intervals_and_corrected_p_of_known_differences(study):
    import evaluate

    noise, rows = np.random.default_rng(0).normal(0, 0.3, 10), []
    for seed in range(10):
        for strategy, factor in {"uniform": 1.0, "speed": 0.8, "min_snr": 1.0 + 0.01 * (-1) ** seed}.items():
            value = factor * math.exp(noise[seed] + 1e-3 * seed * factor)
            row = {"task": "style", "images": 16, "strategy": strategy, "seed": seed}
            rows.append({**row, **dict.fromkeys(evaluate.TESTED, value)})
    table = evaluate.compare(pd.DataFrame(rows)).set_index(["metric", "strategy"])
    speed, min_snr = table.loc[("distance", "speed")], table.loc[("distance", "min_snr")]
    assert speed["values"] == pytest.approx(0.8, rel=0.01) and speed["low"] < speed["values"] < speed["high"] < 0.81
    assert speed["p_holm"] == pytest.approx(112 * speed["p_values"]) and speed["p_holm"] < 1e-6
    assert min_snr["p_holm"] == 1
