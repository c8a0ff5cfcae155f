"""Files outside of the results count by their contents, and are read once."""

import os
from pathlib import Path

import pytest

from kairos import outside_files
from kairos.config import validate
from kairos.files import sha256_file
from kairos.outside_files import hash_contents
from kairos.validity import Result, Validity
from kairos.workflow.layout import create_layout
from test_data import write_images
from training_case import experiment, write_experiment


@pytest.fixture
def read(tmp_path, monkeypatch):
    """List of the files that are read, in a project folder with three images in each of two classes."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        for number in range(3):
            Path("photos", name, f"{number}.bmp").write_bytes(bytes([number]) * 100)
    files = []

    def record(path):
        files.append(path.as_posix())
        return sha256_file(path)

    monkeypatch.setattr(outside_files, "sha256_file", record)
    return files


def test_only_changed_folders_are_read_again(read):
    before = hash_contents(["photos"])
    assert len(read) == 6 and hash_contents(["photos"]) == before and len(read) == 6
    Path("photos/b/0.bmp").write_bytes(b"x" * 100)  # of equal size
    assert hash_contents(["photos"]) != before
    assert read[6:] == [f"photos/b/{number}.bmp" for number in range(3)]


def test_contents_and_names_count_and_neither_times_nor_the_path(read):
    before = hash_contents(["photos"])
    os.utime("photos/a/0.bmp", (1, 1))
    assert hash_contents(["photos"]) == before
    Path("photos").rename("elsewhere")
    assert hash_contents(["elsewhere"]) == before
    Path("elsewhere/a/0.bmp").rename("elsewhere/a/9.bmp")
    assert hash_contents(["elsewhere"]) != before


def test_links_are_followed_once_and_hidden_files_left_out(read):
    before = hash_contents(["photos"])
    Path("photos/loop").symlink_to(Path.cwd() / "photos")
    Path("photos/.hidden").write_text("x")
    assert hash_contents(["photos"]) == before
    Path("photos/more").symlink_to(Path.cwd() / "more")
    Path("more").mkdir()
    Path("more/0.bmp").write_text("x")
    assert hash_contents(["photos"]) != before


def test_two_links_to_a_file_do_not_alternate(read):
    for name in ("first", "second"):
        Path(name).symlink_to("photos/a/0.bmp")
    assert len({hash_contents(["first", "second"]) for _ in range(4)}) == 1


def test_a_missing_path_counts_as_empty_and_a_damaged_index_is_replaced(read):
    before = hash_contents(["photos", "photos/a/0.bmp"])
    outside_files._INDEX.write_text("{")
    assert hash_contents(["photos", "photos/a/0.bmp"]) == before
    assert hash_contents([]) == hash_contents(["nowhere"]) != before


def test_a_project_that_cannot_be_written_reads_the_files_each_time(read):
    before = hash_contents(["photos"])
    outside_files._INDEX.unlink()
    outside_files._INDEX.parent.rmdir()
    outside_files._INDEX.parent.write_text("a file in the place of the folder")
    assert hash_contents(["photos"]) == before and len(read) == 12


def test_missing_images_have_the_recorded_hash(tmp_path, monkeypatch):
    from kairos.cli import main

    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", 200)
    dataset = {"dataset__source": "folder", "dataset__path": "photos", "dataset__resolution": 8}
    plain = experiment({"uniform": {}}, **dataset, evaluation__num_samples=80)
    write_experiment(Path("x.yaml"), plain)
    assert main(["prepare", "--config", "x.yaml"]) == 0
    before = describe(plain, "prepare")
    assert not create_layout(validate(plain)).validity.lacks_images
    Path("photos").rename("elsewhere")
    layout = create_layout(validate(plain))
    assert layout.validity.lacks_images and any("files are missing" in note for note in layout.notes)
    assert describe(plain, "prepare") == before
    assert layout.validity.is_valid(Result("prepare"))
    plain["dataset"]["path"] = "elsewhere"  # the content counts, and not the path
    assert describe(plain, "prepare")["key"] == before["key"]
    Path("elsewhere/000.png").unlink()
    assert describe(plain, "prepare")["key"] != before["key"]


def describe(plain: dict, stage: str) -> dict:
    """Return what a stage of an experiment depends on."""
    experiment_config = validate(plain)
    return Validity(experiment_config, f"results/{experiment_config.experiment}", True).describe_stage(stage, None)


def test_files_count_where_a_stage_reads_any():
    assert describe(experiment({"uniform": {}}), "prepare")["outside"] is None


def test_replaced_networks_of_the_evaluation_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights.pth").write_text("1")
    Path("real.npz").write_text("1")
    evaluation = {"extractor": {"name": "inception", "path": "weights.pth"}, "reference": "real.npz"}
    plain = {**experiment({"uniform": {}}), "evaluation": {**evaluation, "num_samples": 3000}}
    before = {stage: describe(plain, stage)["key"] for stage in ("extractor", "reference")}
    Path("weights.pth").write_text("2")
    Path("real.npz").write_text("2")
    assert all(describe(plain, stage)["key"] != before[stage] for stage in before)


def test_links_to_nothing_do_not_count(read):
    before = hash_contents(["photos"])
    Path("photos/a/loop.png").symlink_to("loop.png")
    Path("photos/a/absent.png").symlink_to("nowhere")
    Path("photos/a/inside.png").symlink_to("0.bmp/x")
    os.mkfifo("photos/a/pipe.png")
    assert hash_contents(["photos"]) == before
