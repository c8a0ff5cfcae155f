"""Analyses against direct computation, closed forms and known results; validation errors; the whole pipeline."""

import itertools
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import results_tree
from kairos.analyses import tables
from kairos.analyses.gradients import compute_gradient_moments
from kairos.analyses.noise_levels import area_levels, even_levels, load_optimizer_state, log_snr_levels
from kairos.analyses.settings import ANALYSES, SnapshotOptions, analysed_snapshots, snapshot_table_path
from kairos.cli import main
from kairos.config import validate
from kairos.files import write_text
from kairos.models.backbone import Backbone
from kairos.models.settings import BACKBONES, BackboneOptions
from kairos.report.analysis_figures import _draw_interdependence, _draw_subset_size, write_analysis
from kairos.snapshots import open_snapshot
from kairos.training.state import TrainingState
from kairos.validity import Validity
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.randomness import Stream
from report_page import page_of
from training_case import experiment, make_latents, train, write_experiment
from workflow_copy import copy_finished_run

PROCESSES = ("linear", "cosine", "edm", "flow", "vp")


class Small(nn.Module):
    """Network with an unused parameter, which gets no gradient, as in a branch that is not taken."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.unused = nn.Linear(6, 5), nn.Linear(5, 6), nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, t):
        hidden = torch.tanh(self.inner(x.flatten(1)) + t[:, None].float().sin())
        return self.outer(self.dropout(hidden)).view_as(x)


@pytest.mark.parametrize("name", PROCESSES)
def test_gradient_moments_equal_those_of_a_matrix_of_all_gradients(name):
    """The metric scales the gradients of each parameter; dropout is off."""
    process, model, levels, count = as_process(name), Small(), [(0.0, 0.1), (0.1, 0.6), (0.9, 1.0)], 7
    x0 = torch.randn(3 * count, 6, 1, 1, generator=torch.Generator().manual_seed(1))
    metric = [torch.rand_like(parameter) + 0.5 for parameter in model.parameters()]
    diagonal = torch.cat([factors.flatten() for factors in metric]).double().numpy()
    plain, scaled = (
        compute_gradient_moments(model, process, x0, levels, seed=5),
        compute_gradient_moments(model, process, x0, levels, seed=5, metric=metric),
    )
    assert model.training  # the model's mode is restored
    model.eval()
    means = []
    for level, (low, high) in enumerate(levels):
        u = low + (high - low) * Stream(5, "analysed times").uniform(level, range(count))
        noise = Stream(5, "analysed noise").normal(level, range(count), (6, 1, 1))
        clean, t = x0[level * count : (level + 1) * count], process.times(u)
        output = process.predict(model, process.noised(clean, noise, t), t)
        losses = ((output - process.target(clean, noise, t)) ** 2).mean((1, 2, 3))
        rows = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]).double().numpy())
        rows = np.array(rows)
        assert plain.losses[level] == pytest.approx(losses.detach().numpy(), rel=1e-4)
        for moments, gradient_rows in ((plain, rows), (scaled, rows * np.sqrt(diagonal))):
            variance = np.trace(np.cov(gradient_rows.T))
            squared = (gradient_rows.mean(0) ** 2).sum() - variance / count
            scale = variance + (gradient_rows.mean(0) ** 2).sum()
            assert moments.variance[level] == pytest.approx(variance, rel=1e-4)
            assert moments.squared_mean[level] == pytest.approx(squared, abs=1e-5 * scale)
        means.append(rows.mean(0))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert plain.products[a, b] == pytest.approx(means[a] @ means[b], rel=1e-3, abs=1e-6)
        assert scaled.products[a, b] == pytest.approx(means[a] @ (diagonal * means[b]), rel=1e-3, abs=1e-6)


class Constant(nn.Module):
    """Network with a constant output: g = 2 (theta - eps)/d, so G = 2 theta/d and tr Sigma = 4/d for any process."""

    def __init__(self, theta):
        super().__init__()
        self.theta = nn.Parameter(theta)

    def forward(self, x, t):
        return self.theta.expand_as(x)


@pytest.mark.long
def test_estimates_of_gradient_moments_are_unbiased():
    theta = torch.tensor([0.3, -0.2, 0.1, 0.2])[:, None, None]
    norm, moments, seeds = float((theta**2).sum()), [], 120
    for seed in range(seeds):  # with 2 images a level, division by 2 instead of 1 would halve the variance
        moments.append(
            compute_gradient_moments(
                Constant(theta), as_process("linear"), torch.zeros(4, 4, 1, 1), [(0.0, 0.5), (0.5, 1.0)], seed=seed
            )
        )
    variances = [estimate.variance for estimate in moments]
    products = [estimate.products for estimate in moments]
    for values, truth in ((variances, 1.0), (products, norm / 4)):
        values = np.array(values).reshape(seeds, -1)
        error = values.std(0) / seeds**0.5
        assert (abs(values.mean(0) - truth) < 4 * error).all() and (error < 0.08).all()
    larger = 3 * theta
    many = compute_gradient_moments(Constant(larger), as_process("linear"), torch.zeros(200, 4, 1, 1), [(0.0, 1.0)])
    # tr Sigma / ||G||²; standard error 13 %
    assert many.noise_scale[0] == pytest.approx(4 / float((larger**2).sum()), rel=0.4)
    assert many.cosines[0, 0] == 1
    opposite = compute_gradient_moments(
        Constant(theta),
        as_process("linear"),
        torch.zeros(100, 4, 1, 1),
        [(0.0, 0.5), (0.5, 1.0)],
        loss=lambda batch: (batch.output[:, 0, 0, 0] - 9.0 * (1 - 2 * (batch.t >= 500))).square(),
    )
    assert opposite.cosines[0, 1] == pytest.approx(-1) and opposite.variance == pytest.approx([0, 0], abs=1e-3)


@pytest.mark.parametrize("name", PROCESSES)
def test_noise_levels_cover_their_range_without_gaps(name):
    process = as_process(name)
    levels = log_snr_levels(process, 6, -5.0, 4.0)
    for facts, (low, high) in levels:
        ends = np.log(process.schedule.snr)[[round(low * 1000 - 0.5), round(high * 1000 - 0.5)]]
        assert facts["log_snr"] == pytest.approx(ends.mean(), abs=0.1)
        assert ends[0] - ends[1] == pytest.approx(9 / 6, abs=0.2)
    areas = area_levels(process, 5.0)
    assert [facts["area"] for facts, _ in areas] == ["acceleration", "deceleration", "convergence"]
    for covering in ([ends for _, ends in areas], [ends for _, ends in even_levels(7)]):
        assert covering[0][0] == 0 and covering[-1][1] == 1
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covering))


def test_areas_of_the_linear_schedule_equal_those_of_the_paper():
    """The paper counts from 1: its x_220 is timestep 219, and its x_399, the first after tau = 398.18, timestep 398."""
    assert [ends for _, ends in area_levels(as_process("linear"), 5.0)] == [(0, 0.219), (0.219, 0.398), (0.398, 1)]


class Table(Backbone):
    """One learned image for every twenty timesteps, without shared parameters: parts of the process are independent."""

    def __init__(self, options, shape, conditions, outputs):
        super().__init__(options, shape, conditions, outputs)
        self.images = nn.Parameter(torch.full((5, *shape), 0.5))

    def forward(self, x, t, conditions):
        return self.images[t.long() // 20]


class TableOptions(BackboneOptions):
    code: ClassVar[str] = "test_analyses:Table"

    name: str = "table"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of results with training runs of a `Table`, and its experiment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "table", TableOptions)
        folder = tmp_path_factory.mktemp("case")
        latents = make_latents(folder)
        analyses = [
            {"name": "interdependence", "steps": 30},
            {"name": "gradient_variance", "bins": 5, "images": 8},
            {"name": "agreement", "bins": 3},
        ]
        plain = experiment(
            {"uniform": {}, "vlb": {"weighting": "vlb"}}, model={"name": "table"}, diffusion__prediction="x0"
        )
        plain = validate(plain | {"analyses": analyses}).plain()
        for method in ("uniform", "vlb"):
            train(plain, method, 0, folder / "methods" / method / "seed0", latents, [0, 20, 40])
        yield folder, plain


def measure(trained, name, step, method="uniform", **options):
    """Run an analysis of a snapshot; returns its table."""
    folder, plain = trained
    analysis = next(analysis for analysis in plain["analyses"] if analysis["name"] == name)
    snapshot = folder / "methods" / method / f"seed0/snapshots/{step:07d}"
    out = snapshot.parents[1] / f"analyses/{name}.{step:07d}.csv"
    analysis = ANALYSES.select(analysis | options)
    tables.measure_snapshot(analysis, snapshot, folder / "latents", out, torch.device("cpu"))
    return pd.read_csv(out)


@pytest.mark.long
def test_training_on_one_part_does_not_change_independent_parts(trained):
    table = measure(trained, "interdependence", 20).set_index(["trained", "part"])
    assert len(table) == 30 and set(table["step"]) == {20}
    for (part, other), row in table.iterrows():
        if part in (str(other), "all"):
            assert row["change"] == pytest.approx(row["after"] - row["before"], abs=1e-6)
            assert row["change"] < -5 * row["standard_error"] < 0  # it learns the mean image
        else:
            assert row["change"] == row["standard_error"] == 0
    single = table.loc[[(str(k), k) for k in range(5)], "change"].mean()
    assert single < table.loc["all", "change"].mean() < 0  # five times the samples
    assert measure(trained, "interdependence", 20).set_index(["trained", "part"]).equals(table)


def test_interdependence_trains_without_warm_up_in_double_precision(tmp_path, monkeypatch):
    optimizer = {"lr": 1e-3, "warmup_steps": 100}
    analyses = [{"name": "interdependence", "steps": 2, "images": 4, "parts": 2}]
    settings = {"training__precision": "fp64", "training__optimizer": optimizer, "training__milestones": [2]}
    plain = experiment({"uniform": {}}, analyses=analyses, evaluation__metrics=["frechet"], **settings)
    train(plain, "uniform", 0, tmp_path / "methods/uniform/seed0", make_latents(tmp_path), [2])
    learning_rates = []
    learning_rate = TrainingState.learning_rate

    def record_rate(training, step):
        learning_rates.append(learning_rate(training, step))
        return learning_rates[-1]

    monkeypatch.setattr(TrainingState, "learning_rate", record_rate)
    table = measure((tmp_path, plain), "interdependence", 2)
    assert len(table) == 6 and (table["change"] != 0).all()
    assert learning_rates and set(learning_rates) == {1e-3}


@pytest.mark.long
def test_agreement_uses_the_optimizer_state_of_the_last_snapshot(trained):
    folder, plain = trained
    last = folder / "methods/uniform/seed0/snapshots/0000040"
    earlier = last.parent / "0000020"
    cpu = torch.device("cpu")
    assert load_optimizer_state(earlier, open_snapshot(earlier), cpu) is None
    state = load_optimizer_state(last, open_snapshot(last), cpu)
    rows = measure(trained, "agreement", 40)
    assert set(measure(trained, "agreement", 20)["loss"]) == {"training"}
    plain, adam = (rows[rows["loss"] == loss] for loss in ("training", "preconditioned"))
    largest = float((1 / (state["state"][0]["exp_avg_sq"].sqrt() + 1e-8)).max())
    assert (adam["variance"].to_numpy() < largest * plain["variance"].to_numpy()).all()
    assert not np.allclose(adam["noise_scale"], plain["noise_scale"])


@pytest.mark.long
def test_gradient_variance_uses_the_weighting_of_the_method(trained):
    """The loss of uniform is unweighted; with weighting vlb it is the bound, whose variance is proportional to c²."""
    plain, bound = (measure(trained, "gradient_variance", 40, method) for method in ("uniform", "vlb"))
    for table, is_bound in ((plain, False), (bound, True)):
        training, vlb = (table[table["loss"] == loss].reset_index() for loss in ("training", "vlb"))
        for column in ("loss_mean", "variance"):
            assert np.allclose(training[column], vlb[column], rtol=1e-3) is is_bound
    assert (plain["density"] == 1).all() and len(plain) == 10
    again = measure(trained, "gradient_variance", 40)
    assert again.equals(plain)
    assert not measure(trained, "gradient_variance", 40, seed=1).equals(plain)


@pytest.mark.long
def test_the_table_of_an_analysis_requires_the_tables_of_all_snapshots(trained):
    folder, plain = trained
    uniform = validate(plain | {"methods": {"uniform": {}}})
    analysis = uniform.analyses[1]
    for step in (0, 20):
        measure(trained, "gradient_variance", step)
    measure(trained, "gradient_variance", 40)
    write_analysis(analysis, uniform, folder)
    assert set(pd.read_csv(folder / "analyses/gradient_variance.csv")["step"]) == {0, 20, 40}
    assert (folder / "analyses/gradient_variance.png").stat().st_size > 10_000
    (folder / "methods/uniform/seed0/analyses/gradient_variance.0000020.csv").unlink()
    with pytest.raises(KairosError, match=r"0000020\.csv is missing; `kairos analyse --step`"):
        write_analysis(analysis, uniform, folder)


def test_the_table_of_an_analysis_contains_method_names_as_text(tmp_path):
    methods = {"10": {}, "NA": {"weighting": "min_snr"}, "1e3": {}}
    config = validate(experiment(methods) | {"analyses": ["gradient_variance"]})
    (analysis,) = config.analyses
    for method, seed, step in analysed_snapshots(analysis, config):
        rows = pd.DataFrame(
            [{"method": method, "seed": seed, "step": step, "variance": value} for value in (0.5, None)]
        )
        tables.write_table(rows, tmp_path / snapshot_table_path(tmp_path, analysis.name, method, seed, step))
    table = tables.build_table(analysis, config, tmp_path)
    assert set(table.groupby("method").groups) == {*methods}
    assert table["step"].dtype == int and table["variance"].count() == len(table) / 2


@pytest.mark.parametrize("content", ["", '"'])
def test_a_damaged_file_is_reported_by_its_name(content, tmp_path, capsys):
    """A strategy.csv, which analysis density reads, and the table of a snapshot."""
    config, results = results_tree.write(tmp_path, (0,), ("uniform",))
    values = yaml.safe_load(config.read_text()) | {"analyses": ["density", "agreement"]}
    config.write_text(yaml.safe_dump(values))
    experiment_config = validate(values)
    density, agreement = experiment_config.analyses
    strategy_file = results / "methods/uniform/seed0/snapshots/0000200/strategy.csv"
    table_paths = [
        Path(snapshot_table_path(results, agreement.name, *snapshot))
        for snapshot in analysed_snapshots(agreement, experiment_config)
    ]
    for path in table_paths:
        write_text(path, "method,seed,step\nuniform,0,0\n")
    for analysis, path in ((density, strategy_file), (agreement, table_paths[-1])):
        path.write_text(content)
        command = ["analyse", "--config", str(config), "--results", str(results), "--analysis", analysis.name]
        assert main(command) == 1
        message = capsys.readouterr().err
        assert str(path) in message and "cannot be read" in message and message.count("\n") == 1


DISCRETE = {"name": "discrete", "timesteps": 100}


@pytest.mark.long
@pytest.mark.parametrize("process", [{"name": "edm"}, {"name": "flow"}, DISCRETE], ids=["edm", "flow", "discrete"])
def test_every_analysis_runs_for_every_process(process, tmp_path):
    latents = make_latents(tmp_path)
    analyses = [{"name": "interdependence", "steps": 2, "images": 8, "parts": 3}, {"name": "areas", "images": 2}]
    if process is not DISCRETE:  # the others run in the pipeline with a discrete process
        analyses += [
            {"name": "gradient_variance", "bins": 3, "images": 2},
            {"name": "agreement", "bins": 3, "images": 3},
            "density",
        ]
    config = validate(
        experiment({"log_normal": {"sampler": "log_normal"}}, diffusion__process=process) | {"analyses": analyses}
    )
    config = config.model_copy(update={"training": config.training.model_copy(update={"milestones": [4]})})
    train(config.plain(), "log_normal", 0, tmp_path / "methods/log_normal/seed0", latents, [0, 4])
    for analysis in config.analyses:
        for step in (0, 4) if isinstance(analysis, SnapshotOptions) else ():
            measure((tmp_path, config.plain()), analysis.name, step, "log_normal")
        write_analysis(analysis, config, tmp_path)
        assert (tmp_path / "analyses" / f"{analysis.name}.png").exists()
        values = pd.read_csv(tmp_path / "analyses" / f"{analysis.name}.csv")
        assert np.isfinite(
            values.select_dtypes("number").drop(columns=values.filter(regex="cosine|noise_scale").columns)
        ).all(axis=None)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Made-up results of uniform and of adaptive with three numbers of selected timesteps; read-only."""
    with pytest.MonkeyPatch.context() as patch:
        for size, distance in ((1, 25.0), (3, 20.0), (10, 22.0)):
            sampler = {"name": "adaptive", "frequency": 4, "selected": size}
            patch.setitem(results_tree.METHODS, f"adaptive-selected={size}", ({"sampler": sampler}, distance, 1.4))
        methods = ("uniform", "min_snr", *(name for name in results_tree.METHODS if "=" in name))
        config, results = results_tree.write(tmp_path_factory.mktemp("tree"), (0, 1), methods)
        analyses = ["density", "relative_time", "subset_size", "increments"]
        config.write_text(config.read_text() + f"analyses: [{', '.join(analyses)}]\n")
        for name in analyses:
            assert main(["analyse", "--config", str(config), "--results", str(results), "--analysis", name]) == 0
        yield config, results


@pytest.mark.long
def test_analyses_of_recorded_results_equal_known_values(tree, tmp_path):
    config, results = tree
    timed = pd.read_csv(results / "analyses/relative_time.csv")
    uniform = timed[timed["method"] == "uniform"]
    best = uniform.groupby("step")["distance"].mean().iloc[1:].idxmin()
    assert uniform[uniform["step"] == best]["relative_time"].mean() == pytest.approx(1)
    assert np.allclose(timed["relative_time"] * 0.05 * best, timed["seconds"])  # 0.05 s a step
    assert timed["distance"].iloc[1] == pytest.approx(results_tree.distance("uniform", 0, 100))
    sized = pd.read_csv(results / "analyses/subset_size.csv")
    assert sized.groupby("method")["selected"].first().dropna().to_dict() == {
        f"adaptive-selected={k}": k for k in (1, 3, 10)
    }
    assert "min_snr" in set(timed["method"]) and "min_snr" not in set(sized["method"])
    density = pd.read_csv(results / "analyses/density.csv")
    means = density.groupby(["method", "seed", "step"])[["density", "trained"]].mean()
    assert np.allclose(means, 1) and density.groupby("method")["trained"].std()["uniform"] < 1e-9
    increments = pd.read_csv(results / "analyses/increments.csv")
    assert len(increments["process"].unique()) == 8
    linear = increments[increments["process"] == "linear"]
    assert (linear["area"].value_counts() == [481, 299, 220]).all()  # from t = 220 and tau = 700
    copy = shutil.copytree(results, tmp_path / "copy")
    (copy / "methods/uniform/seed0/timing.jsonl").unlink()
    assert main(["analyse", "--config", str(config), "--results", str(copy), "--analysis", "relative_time"]) == 1


def test_methods_of_equal_size_are_separate_lines_in_the_figure_of_sizes(tmp_path):
    methods = {"uniform": {}, "other": {"sampler": {"name": "adaptive", "selected": 3}}}
    methods["a"] = {"sampler": {"name": "adaptive"}, "grid": {"sampler.selected": [1, 3], "sampler.frequency": [4, 8]}}
    distances = {f"a-selected={size}-frequency={f}": 10.0 * size + f for size in (1, 3) for f in (4, 8)}
    distances |= {"uniform": 60.0, "other": 50.0}
    options = {"seed": 0, "step": 20, "seconds": 1.0, "relative_time": 1.0, "metric": "fid"}
    rows = []
    for method, distance in distances.items():
        size = np.nan if method == "uniform" else 1 if "=1-" in method else 3
        rows.append({"method": method, "selected": size, "distance": distance, **options})
    figure = _draw_subset_size(pd.DataFrame(rows), validate(experiment(methods)))
    lines = {}
    for container in figure.axes[-1].containers:
        x, y = container.lines[0].get_data()
        lines[container.get_label()] = dict(zip(x, y))
    assert lines == {"a-frequency=4": {1: 14, 3: 34}, "a-frequency=8": {1: 18, 3: 38}, "other": {3: 50}}


def test_the_figure_of_interdependence_shows_differences_of_losses():
    shared = {"method": "uniform", "step": 20}
    rows = []
    for trained, before, change in (("0", 4.0, -0.5), ("1", 4.0, 0.2), ("all", 4.0, -2.0)):
        for part, factor in ((0, 1), (1, 2)):
            interval = {"part": part, "u_low": part / 2, "u_high": (part + 1) / 2}
            for seed in range(2):  # the figure shows the mean over seeds
                values = {"before": before, "change": factor * change * (1 + 0.1 * (2 * seed - 1))}
                rows.append({**shared, "seed": seed, "trained": trained, **interval, **values})
    figure = _draw_interdependence(pd.DataFrame(rows), validate(experiment({"uniform": {}})))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [float(text) for text in texts] == pytest.approx([-0.5, -1, 0.2, 0.4, -2, -4])


@pytest.mark.long
def test_the_report_shows_only_analyses_that_have_results(tree):
    config, results = tree
    page = page_of(config, results)
    assert all(ANALYSES[name].title.replace("'", "&#39;") in page for name in ("density", "increments", "subset_size"))
    assert ANALYSES["agreement"].title not in page


ADAPTIVE = {"sampler": {"name": "adaptive"}, "grid": {"sampler.selected": [1, 3]}}


@pytest.mark.parametrize(
    ("analyses", "methods", "message"),
    [
        (["gradient"], {}, "analyses.0: .*unknown analysis 'gradient'; did you mean 'gradient_variance'"),
        ([{"name": "areas", "R": 2}], {}, r"analyses.0.R: unknown field \(value 2\). Allowed: images, methods"),
        ([{"name": "areas", "r": 1}], {}, "analyses.0.r: got 1, allowed: greater than 1"),
        ([{"name": "agreement", "least": 3}], {}, "analyses.0.least: got 3, allowed: less than 0"),
        (["density", "density"], {}, "analyses: got density twice, allowed: "),
        (
            [{"name": "areas", "methods": ["p2"]}],
            {},
            r"analyses.areas.methods: got \['p2'\], allowed: of uniform, each once",
        ),
        ([{"name": "areas", "methods": []}], {}, r"analyses.areas.methods: got \[\], allowed: of uniform"),
        ([{"name": "areas", "milestones": [30]}], {}, r"analyses.areas.milestones: got \[30\], allowed: of 0, 20, 40"),
        (
            ["relative_time"],
            {"p2": {"weighting": "p2"}},
            "analyses: got relative_time, allowed: .*uniform",
        ),
        (["subset_size"], {}, "analyses: got subset_size, allowed: .*adaptive"),
        (
            [{"name": "interdependence", "parts": 100}],
            {},
            "analyses.interdependence.parts: got 100, allowed: at most diffusion.process.timesteps = 50",
        ),
    ],
)
def test_an_analysis_that_does_not_fit_is_rejected(analyses, methods, message):
    with pytest.raises(ConfigError, match=message):
        experiment(methods or {"uniform": {}}, analyses=analyses, diffusion__process__timesteps=50)


def test_bad_arguments_of_analyse_are_rejected(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"analyses: got interdependence, allowed: .*held-out"):
        experiment({"uniform": {}}, analyses=["interdependence"], dataset__heldout=0, evaluation__metrics=["frechet"])
    assert len(validate(experiment({"uniform": {}, "a": ADAPTIVE}, analyses=["subset_size"])).methods) == 3
    config = str(write_experiment(tmp_path / "density.yaml", experiment({"uniform": {}}, analyses=["density"])))
    for arguments, message in (
        (("areas",), "--analysis: got areas, allowed: density"),
        (("density", "--seed", "0"), "--seed: got 0, allowed: a value with --step, none without"),
        (("density", "--step", "20", "--seed", "0"), "--method: got None, allowed: "),
        (("density", "--step", "20", "--method", "uniform", "--seed", "0"), "--step: got 20, allowed: none"),
        (("density", "--step", "20", "--method", "other", "--seed", "0"), "--method: got 'other', allowed: uniform"),
    ):
        assert main(["analyse", "--config", config, "--analysis", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_changing_the_milestones_of_an_analysis_reruns_no_measurement():
    one_milestone, all_milestones = (
        Validity(validate(experiment({"uniform": {}}, analyses=[analysis])), Path("unused"))
        for analysis in ({"name": "areas", "milestones": [20]}, "areas")
    )
    keys = {
        stage: {validity.describe_stage(stage, None)["key"] for validity in (one_milestone, all_milestones)}
        for stage in ("measure_areas", "analyse_areas")
    }
    assert len(keys["measure_areas"]) == 1 and len(keys["analyse_areas"]) == 2


ANALYSES_IN_YAML = """
analyses:
  - {name: gradient_variance, bins: 3, images: 2, methods: [adaptive], milestones: [20]}
  - {name: agreement, bins: 3, images: 2, methods: [adaptive], milestones: [40]}
  - density
tracking: {enabled: false}
"""


@pytest.mark.long
def test_the_pipeline_runs_analyses_without_rerunning_other_jobs(tmp_path_factory, monkeypatch):
    """The page of a report with analyses has its own test."""
    copy = copy_finished_run(tmp_path_factory)
    experiment_file = copy.folder / "params.yaml"
    experiment_file.write_text(experiment_file.read_text() + ANALYSES_IN_YAML)
    analyse = {"analyse_gradient_variance": 1, "analyse_agreement": 1, "analyse_density": 1}
    measure = {"measure_gradient_variance": 1, "measure_agreement": 1}
    assert copy.to_do(config="params.yaml") == {**analyse, **measure, "report": 1}  # no training
    tables = [f"results/tiny/analyses/{name}.csv" for name in ("gradient_variance", "agreement", "density")]
    ended = copy.snakemake("--", *tables, config="params.yaml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in tables:
        table = copy.folder / name
        assert len(pd.read_csv(table)) > 2
        assert table.with_suffix(".png").stat().st_size > 10_000
    agreement = pd.read_csv(copy.folder / "results/tiny/analyses/agreement.csv")
    assert "preconditioned" in set(agreement["loss"])  # needs the last snapshot
    assert copy.to_do(config="params.yaml") == {"report": 1}
    variance = copy.folder / "results/tiny/analyses/gradient_variance.csv"
    before = variance.read_bytes()
    shutil.rmtree(variance.parent)
    assert copy.to_do(config="params.yaml") == {**analyse, "report": 1}  # the measurements are kept
    monkeypatch.chdir(copy.folder)
    assert main(["analyse", "--config", "params.yaml", "--analysis", "gradient_variance"]) == 0
    assert variance.read_bytes() == before
    old = "bins: 3, images: 2, methods: [adaptive], milestones: [40]}\n  - density"
    with copy.edited("params.yaml", old, old.replace("bins: 3", "bins: 4")):
        changed = copy.to_do(config="params.yaml")
        assert (changed["measure_agreement"], changed["analyse_agreement"]) == (1, 1)
        assert "measure_gradient_variance" not in changed
