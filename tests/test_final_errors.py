"""Errors that another attempt of a job would repeat: recorded once, and read by later attempts of the same run."""

import argparse
import json
import os
from pathlib import Path

import pytest

from kairos.config import validate
from kairos.errors import TemporaryError
from kairos.files import DamagedError
from kairos.workflow.final_errors import list_error_files, record_final_error
from kairos.workflow.layout import PLAN_VARIABLE, create_layout, write_plan
from kairos_timesteps.errors import KairosError, NotFiniteError


@pytest.fixture
def open_plan(tmp_path, monkeypatch):
    """Return a function that writes a plan of an experiment with some settings of training, as a controller does."""
    monkeypatch.chdir(tmp_path)

    def write(**training):
        values = {"experiment": "x", "dataset": {"source": "digits"}, "methods": {"a": {}}, "training": training}
        layout = write_plan(create_layout(validate(values, "x.yaml")))
        monkeypatch.setenv(PLAN_VARIABLE, str(layout.plan_file))
        return layout

    return write


def attempt(error: BaseException | None, **values: object) -> str:
    """Run an attempt of a job that raises an error; return the message that the user sees, empty on success."""
    config = Path(json.loads(Path(os.environ[PLAN_VARIABLE]).read_text())["experiment"])
    defaults = {"command": "train", "config": config, "method": "a", "seed": 0, "segment": 1}
    arguments = argparse.Namespace(**{**defaults, **values})
    try:
        with record_final_error(arguments):
            if error is not None:
                raise error
    except (KairosError, OSError) as raised:
        return str(raised)
    return ""


@pytest.mark.parametrize(
    ("error", "training", "is_final"),
    [
        (KairosError("a broken image"), {}, True),
        (NotFiniteError("step 7: loss"), {}, True),
        (NotFiniteError("step 7: loss"), {"compile": True}, False),
        (NotFiniteError("step 7: loss"), {"deterministic": False}, False),
        (TemporaryError("another process is training here"), {}, False),
        (DamagedError("latents: ends early"), {}, False),
        (OSError(28, "No space left on device"), {}, False),
    ],
)
def test_a_final_error_ends_the_next_attempt_before_it_starts(open_plan, error, training, is_final):
    layout = open_plan(**training)
    assert attempt(error) == str(error)
    assert attempt(None) == (str(error) if is_final else "")
    assert [path.name for path in list_error_files(Path(layout.results))] == (
        ["train_a_seed0.error.json"] if is_final else []
    )


def test_errors_belong_to_one_job_and_one_plan(open_plan):
    open_plan()
    attempt(KairosError("broken"))
    assert attempt(None, seed=1) == ""
    assert attempt(None, command="prepare", method=None, seed=None, segment=None) == ""
    assert attempt(None) == "broken"
    open_plan(batch_size=7)
    assert attempt(None) == ""


def test_a_command_for_another_experiment_or_without_one_records_nothing(open_plan, tmp_path):
    open_plan()
    for config in (Path("other.yaml"), None):
        assert attempt(KairosError("broken"), config=config) == "broken"
        assert attempt(None, config=config) == ""
    assert not list_error_files(tmp_path / "results/x")
