"""Recipes of the papers contain all rows of their tables with the published numbers, and kairos accepts them."""

import csv
import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml
from recipe_costs import SEEDS, describe_claims, load_recipes, select_cheapest_tests
from small_form import shrink_experiment

from kairos.cli import main
from kairos.config import load, validate
from kairos.config.published_results import ClaimConfig
from kairos.config.reading import read_experiment_file
from kairos.costs.cards import PEAKS
from kairos.costs.estimate import estimate_cost
from kairos.report.published_numbers import compute_published_factor
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.errors import ConfigError
from marks import mark_long

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SHARED", ROOT.parent / "shared"))
FILES = sorted((ROOT / "recipes").rglob("*.yaml"))
TABLES = {"adaptive": {"1", "2", "3", "4"}, "speed": {"1", "2", "3", "4", "5", "9", "10", "11", "12", "13"}}
# rows in SpeeD's paper that are not in the list of published results
OF_THE_PAPER = {("10", "inception_score"), ("12", "fid10k")}
REPEATED = {("4", "adaptive")}  # table and row: table 4 of Kim et al. 2025 repeats a row of table 1


def list_published_rows():
    """List all rows of the recipes: file, block and row."""
    return [(file, block, row) for file in FILES for block in load(file).published for row in block.numbers()]


def make_key(block, row):
    where = (block.source, block.table, block.dataset, block.backbone, block.schedule)
    method = row.row.replace("adaptive_paper", "adaptive")  # the list names the paper's own method so
    return (*where, method, str(row.printed), block.metric, row.value)


def test_every_table_has_its_files():
    names_by_paper = {paper: {path.stem for path in FILES if path.parent.name == paper} for paper in TABLES}
    for paper, tables in TABLES.items():
        assert {match[1] for name in names_by_paper[paper] if (match := re.match(r"table(\d+)(_|$)", name))} == tables
    assert {"figure1", "figure6", "figure6_long", "figure7a", "figure7b", "super_resolution"} <= names_by_paper["speed"]
    figures = {match[1] for name in names_by_paper["adaptive"] if (match := re.match(r"figure(\d+)(_|$)", name))}
    assert figures == {"1", "2", "4", "5", "6", "7"}
    names = [load(file).experiment for file in FILES]
    assert names == [f"{file.parent.name}_{file.stem}" for file in FILES]


def test_rows_of_recipes_equal_the_published_results():
    """Rows equal those in the list of results; additional rows are in the text of the paper."""
    listed, paper = SHARED / "reference/published_results.csv", SHARED / "papers/speed.txt"
    if not listed.is_file() or not paper.is_file():
        pytest.skip(f"{listed} or {paper} is not here")
    with open(listed, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] in TABLES]
    names = ("source", "table", "dataset", "backbone", "schedule", "method", "steps", "metric")
    expected = {(*(row[name] for name in names), float(row["value"])) for row in rows}
    recipe_rows = {make_key(block, row): (block, row) for _, block, row in list_published_rows()}
    assert expected <= recipe_rows.keys()
    in_table_1 = {(*key[:1], "4", *key[2:]) for key in expected if key[:2] == ("adaptive", "1")}
    repeated = {key for key in recipe_rows if (key[1], key[5]) in REPEATED and key[0] == "adaptive"}
    assert repeated <= in_table_1 and len(repeated) == 5
    additional = {key: recipe_rows[key] for key in recipe_rows.keys() - expected - repeated}
    assert {(block.table, block.metric) for block, _ in additional.values()} == OF_THE_PAPER and len(additional) == 57
    lines = [re.sub(r"[$\\ ]|</?u>", "", line).split("\t") for line in paper.read_text().splitlines()]
    for block, row in additional.values():
        if block.table == "12":  # one line per row
            header, column = row.row.replace("uniform", "DiT-S/8"), block.steps.index(row.step)
            cells = [line[1:] for line in lines if line[0] == header and len(line) == 5]
        else:  # one line per step; the last group of lines has the Inception score
            header, column = f"{row.step // 1000}K", list(block.rows).index(row.row)
            cells = [line[1:] for line in lines if line[0] == header and len(line) == 7][-1:]
        assert [float(line[column]) for line in cells] == [row.value], (block.table, row)


@pytest.mark.long
def test_every_row_has_a_method_or_the_reason_why_it_has_none():
    without = {(block.table, row.row) for _, block, row in list_published_rows() if row.method is None}
    assert without == {("11", "bs")} and "bs" in SAMPLERS.unavailable
    for file, block, row in list_published_rows():
        experiment = load(file)
        assert row.step in experiment.milestones, (file, row)
        assert row.method is None or row.method in experiment.methods
        assert block.samples in (None, experiment.evaluation.num_samples)
        assert block.sampling_steps in (None, experiment.sampling.steps)


def test_the_header_of_a_recipe_cites_its_paper():
    for file in FILES:
        header = re.match(r"(?:#.*\n)+", file.read_text())[0].splitlines()
        assert re.search(r"(Kim|Wang) et al. 2025", " ".join(header[1:])), file


def test_a_recipe_equals_its_plain_values():
    recipe = load(FILES[0])
    assert validate(recipe.plain()) == recipe


CLAIMS = [file for file in FILES if load(file).claim is not None]


@pytest.mark.parametrize("file", CLAIMS, ids=[file.stem for file in CLAIMS])
def test_published_rows_confirm_the_claim_or_the_recipe_states_that_they_do_not(file):
    """The factor by the published rows, without an interval, is at least the claim, or the header has a sentence."""
    experiment, header = load(file), " ".join(re.findall(r"(?m)^# *(.*)$", file.read_text()))
    factor = compute_published_factor(experiment.published, experiment.claim)
    if factor is None:
        assert "the published rows cannot confirm the claim" in header
    else:
        assert f"published rows give {factor:.2f}" in header.replace("#", "")
        assert factor >= experiment.claim.factor or "do not confirm it" in header


@pytest.mark.parametrize("file", CLAIMS, ids=[file.stem for file in CLAIMS])
def test_a_claim_quotes_its_paper(file):
    """The quoted parts of a claim's sentence are in a text of the paper."""
    if not (SHARED / "papers").is_dir():
        pytest.skip(f"{SHARED} is not here")
    texts = [re.sub(r"[\s$\\*]|times", "", text.read_text()).lower() for text in (SHARED / "papers").glob("*.txt")]
    for quoted in re.findall(r'"(.+?)"', load(file).claim.sentence):
        squeezed = re.sub(r"\s|times", "", quoted).replace("3x", "3").lower()
        assert any(squeezed in text for text in texts), quoted


def test_the_factor_of_published_rows_is_the_quantity_of_the_claim():
    """Wang et al. 2025, table 13: 1.69 for the final distance, 2.08 for the highest ratio along the curves."""
    block = load(ROOT / "recipes/speed/table13.yaml").published[0]
    metfaces = load(ROOT / "recipes/speed/table1_metfaces.yaml").published[0]
    ffhq = load(ROOT / "recipes/speed/table1_ffhq.yaml").published[0]
    values = {"sentence": "x", "factor": 2.0, "method": "speed", "baseline": "uniform"}
    final, highest = (ClaimConfig(**values, quantity=name) for name in ("final_distance", "highest_ratio"))
    factors = [compute_published_factor([rows], final) for rows in (ffhq, block, metfaces)]
    assert factors == [pytest.approx(value, abs=0.005) for value in (1.06, 1.69, 2.52)]
    factors = [compute_published_factor([rows], highest) for rows in (ffhq, block, metfaces)]
    assert factors == [pytest.approx(value, abs=0.005) for value in (2.08, 2.08, 2.52)]
    timed = ClaimConfig(**values, quantity="final_distance", cost="time", overhead=1.5)
    assert compute_published_factor([block], timed) == pytest.approx(1.69 / 1.5, abs=0.005)
    values |= {"method": "adaptive_paper", "cost": "time", "overhead": 1.5}
    adaptive = ClaimConfig(**values, quantity="final_distance")
    for schedule, expected in (("linear", 1.53), ("cosine", 0.70), ("quadratic", 0.80)):  # as the recipe states
        rows = load(ROOT / f"recipes/adaptive/table1_{schedule}.yaml").published
        assert compute_published_factor(rows, adaptive) == pytest.approx(expected, abs=0.005)


def test_recipes_of_conditional_networks_name_the_guidance_of_paper_and_code():
    """Without a stated guidance, no comparison counts; the header names the two readings."""
    for file in FILES:
        experiment, header = load(file), " ".join(re.findall(r"(?m)^# *(.*)$", file.read_text()))
        if not {"class", "text"} & {*experiment.conditions}:
            continue
        stated = {block.guidance for block in experiment.published}
        assert stated <= {None} or stated == {1.5}, "the paper states 1.5 for text to image alone"
        assert (stated == {1.5}) == (file.stem == "table4")
        if experiment.training.condition_dropout and file.stem != "table4":  # the network can be guided
            assert "uidance" in header and ("the paper" in header or "The paper" in header), file
    guided, unguided = "recipes/speed/table2_imagenet_dit_guided.yaml", "recipes/speed/table2_imagenet_dit.yaml"
    assert load(ROOT / guided).sampling.guidance_scale == 1.5
    for name in (unguided, "recipes/adaptive/table3_unguided.yaml", "recipes/speed/figure7a_unguided.yaml"):
        assert load(ROOT / name).sampling.guidance_scale == 1


def test_equal_rows_of_two_tables_are_compared_with_equal_methods():
    """The SpeeD row of table 10 (ImageNet) is the row k = 2 of table 12, so both are compared with k = 2."""
    tables = {name: load(ROOT / f"recipes/speed/{name}.yaml") for name in ("table10_imagenet", "table12")}
    compared = {}
    for name, experiment in tables.items():
        (block,) = experiment.published
        row = {"table10_imagenet": "speed", "table12": "k=2"}[name]
        method = experiment.methods[block.methods[row]]
        compared[name] = (block.rows[row][:3], method.sampler.plain(), method.weighting.plain())
    assert compared["table10_imagenet"] == compared["table12"]
    assert tables["table10_imagenet"].methods["speed"].sampler.get("k") == 5


def test_coco_is_compared_with_its_validation_images():
    experiment = load(ROOT / "recipes/speed/table4.yaml")
    assert experiment.evaluation.reference == "heldout" and experiment.dataset.heldout.endswith("val2017")
    assert all(block.reference == "heldout" and block.samples is None for block in experiment.published)


def write_yaml(folder, name, **values):
    (folder / name).write_text(yaml.safe_dump(values))
    return folder / name


def test_a_file_is_merged_over_the_file_that_it_extends(tmp_path):
    base = {"experiment": "a", "methods": {"a": {}, "b": {}}, "diffusion": {"process": "edm"}}
    base["training"] = {"batch_size": 4, "milestones": [1, 2], "optimizer": {"name": "adamw", "lr": 1.0}}
    write_yaml(tmp_path, "a.yaml", **base)
    (tmp_path / "in").mkdir()
    write_yaml(tmp_path, "in/b.yaml", extends="../a.yaml", experiment="b", training={"optimizer": {"lr": 2.0}})
    overrides = {"optimizer": {"name": "adam"}, "milestones": [3]}
    last = write_yaml(
        tmp_path, "c.yaml", extends="in/b.yaml", training=overrides, methods={"c": {}},
        diffusion={"process": {"name": "edm", "sigma_data": 1.0}},
    )  # fmt: skip
    assert read_experiment_file(tmp_path / "in/b.yaml")["training"]["optimizer"] == {"name": "adamw", "lr": 2.0}
    merged = read_experiment_file(last)
    assert merged["experiment"] == "b" and merged["methods"] == {"c": {}}
    assert merged["training"] == {"batch_size": 4, "milestones": [3], "optimizer": {"name": "adam"}}
    assert merged["diffusion"] == {"process": {"name": "edm", "sigma_data": 1.0}}
    assert load(last).training.batch_size == 4


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (3, r"c.yaml: extends: got 3, allowed: the path of an experiment file"),
        ("none.yaml", r"c.yaml: extends: got 'none.yaml', allowed: .*; /.* does not exist"),
        ("c.yaml", r"c.yaml: extends: got 'c.yaml', allowed: .* which does not extend this one"),
        ("list.yaml", r"c.yaml: extends: got 'list.yaml', allowed: a file that is a mapping"),
        ("round.yaml", r"round.yaml: extends: got 'c.yaml', allowed: .* which does not extend this one"),
    ],
)
def test_an_invalid_extends_is_rejected(tmp_path, base, message):
    (tmp_path / "list.yaml").write_text("[1]")
    write_yaml(tmp_path, "round.yaml", extends="c.yaml")
    with pytest.raises(ConfigError, match=message):
        load(write_yaml(tmp_path, "c.yaml", extends=base, experiment="c", methods={"a": {}}))


BLOCK = {
    "source": "x", "table": "1", "dataset": "d", "backbone": "b", "schedule": "linear", "metric": "fid50k",
    "steps": [1000], "rows": {"a": [2.0]},
}  # fmt: skip

CLAIM = {"sentence": "x", "factor": 2.0, "quantity": "final_distance", "method": "a", "baseline": "b"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": {"a": [2.0, 3.0]}}, r"published.rows.a: got 2 numbers, allowed: 1, one for each of published.steps"),
        ({"printed": [1, 2]}, r"published.printed: got 2 numbers, allowed: 1"),
        ({"rows": {"c": [2.0]}}, r"published.rows: got c, allowed: one of a, b, .*published.missing"),
        ({"methods": {"a": "c"}}, r"published.rows: got a, allowed"),
        ({"metrics": "fid"}, r"metrics: unknown field .* did you mean 'metric'"),
    ],
)
def test_inconsistent_published_rows_are_rejected(changed, message):
    values = {"experiment": "x", "methods": {"a": {}, "b": {}}}
    validate({**values, "published": [BLOCK]})
    with pytest.raises(ConfigError, match=message):
        validate({**values, "published": [BLOCK | changed]})
    with pytest.raises(ConfigError, match=r"claim.baseline: got c, allowed: one of a, b"):
        validate({**values, "claim": CLAIM | {"baseline": "c"}})
    for wrong in ({"quantity": "highest_ratio", "cost": "time"}, {"overhead": 1.5}, {"sentence": ""}):
        with pytest.raises(ConfigError, match=r"claim\.(cost|overhead|sentence): got"):
            validate({**values, "claim": CLAIM | wrong})


TINY = {
    "dataset": {"source": "digits"}, "model": {"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2},
    "training": {"milestones": [100, 200, 300, 400], "batch_size": 8, "precision": "bf16"},
    "methods": {"uniform": {}, "adaptive": {"sampler": {"name": "adaptive", "frequency": 2}}},
    "evaluation": {"extractor": "classifier", "num_samples": 100, "sets": 1}, "seeds": [0, 1],
}  # fmt: skip


def test_all_files_of_a_folder_are_checked_by_one_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # without the weights of Inception
    assert main(["check", str(ROOT / "recipes")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(FILES) and lines[0].split() == ["file", "methods", "runs", "milestones", "jobs"]
    write_yaml(tmp_path, "a.yaml", experiment="a", **TINY)
    write_yaml(tmp_path, "b.yaml", experiment="b", **TINY | {"seeds": [1, 1]})
    write_yaml(tmp_path, "c.yaml", experiment="c", **TINY | {"dataset": {"source": "digits", "limit": 20}})
    assert main(["check", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("kairos: 2 files cannot be used") and "b.yaml: seeds: got [1, 1]" in output.err
    assert f"{tmp_path}/c.yaml: evaluation.extractor: got classifier, but" in output.err and "a.yaml" in output.out
    (tmp_path / "none").mkdir()
    assert main(["check", str(tmp_path / "none")]) == 2
    assert "allowed: an experiment file, or a folder with some" in capsys.readouterr().err


def test_the_cheapest_test_of_a_claim_is_found_in_a_folder(capsys, tmp_path):
    claim = {"factor": 3.0, "method": "adaptive", "baseline": "uniform", "cost": "steps"}
    claim |= {"sentence": '"three times" (a paper)', "quantity": "final_distance"}
    write_yaml(tmp_path, "long.yaml", experiment="a", claim=claim, **TINY)
    short = TINY["training"] | {"milestones": [100, 200]}
    write_yaml(tmp_path, "short.yaml", experiment="b", claim=claim | {"cost": "time"}, **TINY | {"training": short})
    long, brief = load_recipes(tmp_path)
    assert [one.experiment for one in select_cheapest_tests([long, brief])] == [brief.experiment]
    assert long.test_steps == {"uniform": 400, "adaptive": 200}
    assert brief.test_steps == {
        "uniform": 200,
        "adaptive": 100,
    }
    operations = {name: cost.flops_per_step for name, cost in long.estimate.methods.items()}
    assert operations["adaptive"] > 2 * operations["uniform"]
    forward = long.estimate.network.forward_flops / long.estimate.network.samples
    images = 5 * 100 * 50  # snapshots, samples and network evaluations per sample
    hours = sum(operations.values()) * 400 / PEAKS["H100"]["bf16"] + 2 * images * forward / PEAKS["H100"]["fp32"]
    assert long.gpu_hours("H100", 0.5) == pytest.approx(2 * hours / 1e12 / 3600 / 0.5)
    trained = (operations["uniform"] * 400 + operations["adaptive"] * 200) / PEAKS["A100"]["bf16"]
    sampling = 3 * 100 * 50 * forward / PEAKS["A100"]["fp32"]  # one snapshot of uniform, two of adaptive
    assert long.test_gpu_hours("A100", 1.0) == pytest.approx(SEEDS * (trained + sampling) / 1e12 / 3600)
    (sentence,) = describe_claims([long, brief], 0.5)
    assert f"he cheapest test is {tmp_path}/short.yaml with 5 seeds,\n  uniform at 200 and adaptive at 100" in sentence
    assert sentence.strip().startswith('"three times" (a paper). As a test: a speed-up in training time of 3 for')
    highest = long.experiment.model_copy(update={"claim": ClaimConfig(**claim | {"quantity": "highest_ratio"})})
    along = dataclasses.replace(long, experiment=highest)
    assert along.test_steps == {"uniform": 400, "adaptive": 400}
    assert along.test_gpu_hours("H100", 0.5) == pytest.approx(SEEDS / 2 * along.gpu_hours("H100", 0.5))
    assert main(["plan", str(tmp_path)]) == 2 and "pass an experiment file" in capsys.readouterr().err


def test_a_plan_uses_the_known_shape_and_classes_of_absent_data(capsys, tmp_path):
    values = {**TINY, "autoencoder": {"kind": "pretrained", "path": "not/here"}, "dataset": {"source": "folder"}}
    values["dataset"] |= {"path": str(tmp_path / "none"), "resolution": 32}
    values["model"] = TINY["model"] | {"conditions": ["class"]}
    file = write_yaml(tmp_path, "a.yaml", experiment="a", **values)
    assert main(["plan", str(file)]) == 2 and "--shape C H W" in capsys.readouterr().err
    file = write_yaml(tmp_path, "a.yaml", experiment="a", known={"shape": [4, 4, 4], "classes": 7}, **values)
    assert main(["plan", str(file)]) == 0
    assert "input of the network 4x4x4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("file", FILES, ids=[f"{file.parent.name}-{file.stem}" for file in FILES])
def test_small_forms_keep_the_settings_of_their_recipe(tmp_path, file):
    """Small forms have few methods with their published rows and at most 100 steps, on digits if images are absent."""
    recipe, data = load(file), SHARED / "data"
    needs = recipe.text_encoder or recipe.dataset.low_resolution
    if needs and not (data / "coco_mini").is_dir():
        with pytest.raises(ConfigError, match="allowed: a folder with coco_mini and taesd"):
            shrink_experiment(recipe, tmp_path, "encoder", 100)
        pytest.skip(f"{data} is not here")
    small = validate(shrink_experiment(recipe, data if needs else tmp_path, "encoder", 100))
    small.resolve()
    assert small.experiment == f"{recipe.experiment}_small" and small.milestones == (0, 50, 100)
    analyses = [analysis.name for analysis in recipe.analyses]
    assert len(small.methods) == min(3 if "subset_size" in analyses else 2, len(recipe.methods))
    assert {*small.methods} <= {*recipe.methods} and [analysis.name for analysis in small.analyses] == analyses
    assert small.diffusion == recipe.diffusion and small.model.name == recipe.model.name
    assert small.conditions == recipe.conditions and small.claim == recipe.claim
    assert small.sampling.scheduler == recipe.sampling.scheduler
    kept = {row for block in small.published for row in block.numbers()}
    assert kept == {row for block in recipe.published for row in block.numbers() if row.method in small.methods}


@pytest.mark.parametrize("name", mark_long(["adaptive/table2", "speed/table1_ffhq"], ["speed/table1_ffhq"]))
def test_small_forms_have_under_a_million_parameters(tmp_path, name):
    small = validate(shrink_experiment(load(ROOT / f"recipes/{name}.yaml"), tmp_path, "encoder", 20))
    assert small.milestones == (0, 10, 20)
    network = estimate_cost(small, classes=10).network
    assert 100_000 < network.parameters + network.fixed_parameters < 1e6


def test_a_small_form_of_too_many_steps_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--steps: got 101, allowed: 2 to 100"):
        shrink_experiment(load(FILES[0]), tmp_path, "encoder", 101)


@pytest.mark.long
def test_the_network_of_every_recipe_runs_on_its_data():
    """The network of each recipe runs forward on tensors with the shapes of its data and without content."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kairos import models
    from kairos.costs.network import count_network_cost
    from kairos.models.settings import BACKBONES

    small_cost = count_network_cost(BACKBONES.select(TINY["model"]), (4, 4, 4), {}, 1)
    shapes = {}

    def run_forward(model, shape, conditions, samples, precision, output_channels):
        key = repr((model, shape, conditions, output_channels))
        if key not in shapes:
            model.load()  # before FakeTensorMode: imported modules must see the usual torch
            with FakeTensorMode(), torch.no_grad():
                network = models.build(model, shape, conditions, output_channels)
                t = torch.zeros(2, dtype=torch.int64)
                values = {
                    name: t if condition["kind"] == "class" else torch.empty(2, *condition["shape"])
                    for name, condition in conditions.items()
                }
                shapes[key] = tuple(network(torch.empty(2, *shape), t, values).shape)
        assert shapes[key] == (2, output_channels, *shape[1:]), model
        return small_cost

    for file in FILES:
        estimate_cost(load(file), tflops=1, count_network=run_forward)
    assert len(shapes) > 10


@pytest.mark.long
def test_the_page_of_a_paper_has_every_recipe_and_number(monkeypatch):
    import paper_pages

    title, differs = paper_pages.read_header(ROOT / "recipes/speed/table5.yaml")
    assert title.startswith("Wang et al. 2025, table 5, ablations") and len(differs) == 3
    assert differs[0].startswith("k = 1 is uniform") and "5b and 5c" in differs[0]
    block = load(ROOT / "recipes/speed/table11.yaml").published[0]
    text = paper_pages._numbers(block)
    assert "| bs | none: its density is not published" in text and "| `b_ttdm` | 157.4 | 150.9 | 140.5 |" in text
    few = [ROOT / f"recipes/adaptive/{name}.yaml" for name in ("table4", "table1_cosine")]
    monkeypatch.setattr("recipe_costs.find_experiment_files", lambda folder: few)
    page = paper_pages.paper("adaptive")
    assert page.count("\n## ") == 2 and "| [table4](#table4) | 10 numbers |" in page and "| – | – |" not in page
    ran = paper_pages._ran()["recipes/adaptive/table4.yaml"]
    assert f"| {ran['seconds']} | {paper_pages.plain(ran['result'])} |" in page
    monkeypatch.setattr(paper_pages, "SMALL", ROOT / "absent.csv")
    assert "| – | – |" in paper_pages.paper("adaptive")
    assert "cheapest test" not in page, "neither file has a claim"
