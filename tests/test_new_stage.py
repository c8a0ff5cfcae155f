"""A new stage is a row of the table, a rule file and a module: a copy of the pipeline gets one."""

import json
from pathlib import Path

import pytest

from workflow_copy import Copy

pytestmark = pytest.mark.long
CONFIG = "tests/tiny.yaml"
RECORD = "results/tiny/brightness/record.json"

ROW = """    Stage(
        "brightness",
        command="kairos.brightness",
        description="measure the mean brightness of the images",
        needs=("prepare",),
        fields=("training.threads",),
        code=("kairos.brightness",),
        record_path="brightness/record.json",
        content_fields=("mean",),
    ),
"""
RULE = """# Mean brightness of the images.


rule brightness:
    input:
        layout.inputs("brightness"),
    output:
        update(layout.outputs("brightness")),
    params:
        config=layout.config_argument,
    shell:
        "kairos brightness --config {params.config}"
"""
MODULE = '''"""Mean brightness of the images."""

import argparse

from kairos.cli.common import add_config
from kairos.cli.jobs import open_job
from kairos.data.dataset import open_dataset
from kairos.files import write_record
from kairos.validity import Result


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the mean of all pixels."""
    job = open_job(arguments)

    def write() -> None:
        images = open_dataset(job.results / "dataset").images[:]
        write_record(job.results / "brightness" / "record.json", {"mean": float(images.mean())})

    job.compute(Result("brightness"), write)
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of the pipeline with the stage, which has run."""
    copy = Copy(tmp_path_factory.mktemp("new_stage"))
    table = copy.folder / "src/kairos/stages.py"
    text = table.read_text()
    row_of_extractor = text.index("    EXTRACTOR := Stage(")
    table.write_text(text[:row_of_extractor] + ROW + text[row_of_extractor:])
    (copy.folder / "workflow/rules/brightness.smk").write_text(RULE)
    (copy.folder / "src/kairos/brightness.py").write_text(MODULE)
    assert copy.to_do(config=CONFIG)["brightness"] == 1  # a target of the whole workflow
    ran = copy.snakemake("--quiet", "all", "--", RECORD, config=CONFIG)
    assert ran.returncode == 0, ran.stderr
    return copy


def kairos(copy: Copy, *arguments: str) -> str:
    done = copy.run_forked("kairos", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_row_a_rule_and_a_module_are_a_stage(copy: Copy) -> None:
    record = json.loads((copy.folder / RECORD).read_text())
    assert 0 < record["mean"] < 255 and set(record["computed_from"]["inputs"]) == {"prepare"}
    assert "brightness" not in copy.to_do(config=CONFIG)


def test_views_and_commands_contain_it(copy: Copy) -> None:
    assert "measure the mean brightness" in kairos(copy, "--help")
    for command in ("check", "plan"):
        assert "brightness" in kairos(copy, command, CONFIG)
    assert "brightness" in kairos(copy, "status", CONFIG).split("missing:")[0]


def test_what_it_was_computed_from_decides_its_validity(copy: Copy) -> None:
    module, record = "src/kairos/brightness.py", Path(copy.folder, RECORD)
    with copy.edited(module, "Write the mean", "Compute the mean"):
        assert "brightness" not in copy.to_do(config=CONFIG)
    with copy.edited(module, "images.mean()", "images.mean() / 255"):
        assert copy.to_do(config=CONFIG)["brightness"] == 1
        assert "brightness" in kairos(copy, "accept", CONFIG)
        assert "brightness" not in copy.to_do(config=CONFIG)
    with copy.edited(CONFIG, "heldout: 0.25", "heldout: 0.5"):
        assert copy.to_do(config=CONFIG)["brightness"] == 1
    kairos(copy, "discard", CONFIG, "--stage", "brightness")
    assert not record.exists() and copy.to_do(config=CONFIG)["brightness"] == 1
