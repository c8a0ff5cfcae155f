"""Distances and the validation loss against torch-fidelity and closed forms, and the cache of real statistics."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kairos.evaluation import metrics, validation
from kairos.evaluation.measurements import FeatureBuffer, ImageStatistics, MomentSums, measure
from kairos.evaluation.metrics import Comparison, RealStatistics
from kairos.evaluation.settings import (
    MEASUREMENTS,
    METRICS,
    LossSettings,
    MetricOptions,
    metrics_with_options,
    needs_of_real_images,
)
from kairos_timesteps.errors import KairosError
from training_case import make_process


def gaussian_features(mean, std, count=20_000, width=4, seed=0):
    """Return normally distributed features (count, width)."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * std + mean


def measure_features(features: torch.Tensor, size: int = 777) -> ImageStatistics:
    """Measure features in batches, as stage evaluate does."""
    buffer, moments = FeatureBuffer(), MomentSums()
    for batch in features.split(size):
        buffer.add(batch)
        moments.add(batch)
    return ImageStatistics(len(features), {"features": moments.mean_and_covariance}, buffer.rows())


def comparison_with(features: torch.Tensor, *names: str, metric: str = "frechet_x") -> Comparison:
    """Return the comparison by some metrics, with features of the real images."""
    real = metrics.statistics_to_store(measure_features(features))
    return Comparison(metric, real, tuple(metrics_with_options(names)))


def test_the_frechet_distance_of_gaussians_equals_the_closed_form():
    comparison = comparison_with(gaussian_features(0.0, 1.0), "frechet")

    def frechet(mean, std, seed=0):
        return comparison.score(measure_features(gaussian_features(mean, std, seed=seed)))["frechet_x"]

    assert frechet(0.0, 1.0) == pytest.approx(0, abs=1e-6)
    assert 0 < frechet(0.0, 1.0, seed=1) < 0.01
    # d² = d (m² + (s - 1)²) = 4 (0.25 + 1)
    assert frechet(0.5, 2.0, seed=1) == pytest.approx(5.0, rel=0.03)


def test_the_bias_of_the_frechet_distance_of_equal_gaussians_is_as_expected():
    # 1,347 and 450 samples of 32 dimensions have an expected distance of 0.9, measured beforehand
    values = []
    for seed in range(4):
        comparison = comparison_with(gaussian_features(0.0, 1.0, 1347, 32, 2 * seed), "frechet")
        values.append(
            comparison.score(measure_features(gaussian_features(0.0, 1.0, 450, 32, 2 * seed + 1)))["frechet_x"]
        )
    assert np.mean(values) == pytest.approx(0.9, abs=0.15)


@pytest.mark.parametrize("count,width,mean", [(3000, 64, 0.4), (500, 128, 300.0), (70, 100, 0.4)])
def test_the_frechet_distance_equals_that_of_torch_fidelity(count, width, mean):
    """Cases include features with a large mean, and covariances without full rank."""
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(9)) / width**0.5
    sets = [(gaussian_features(0.0, 1.0, count, width, seed) @ mixing + mean).float() for seed in (0, 1)]
    references = [fid_features_to_statistics(features.double()) for features in sets]
    moments = [measure_features(features).gaussians["features"] for features in sets]
    for (feature_mean, covariance), reference in zip(moments, references):
        np.testing.assert_allclose(feature_mean, reference["mu"], rtol=1e-12)
        np.testing.assert_allclose(covariance, reference["sigma"], rtol=1e-7, atol=1e-9)
    value = comparison_with(sets[1], "frechet").score(measure_features(sets[0]))["frechet_x"]
    expected = fid_statistics_to_metric(*references, verbose=False)["frechet_inception_distance"]
    assert value == pytest.approx(expected, rel=1e-6 if count > width else 1e-3)


def test_the_inception_score_equals_that_of_torch_fidelity():
    """The splits equal those of ADM's evaluator: 5,000 images each in order, the last one with the rest."""
    from torch_fidelity.metric_isc import isc_features_to_metric

    (options,) = metrics_with_options(["isc"])
    comparison = Comparison("fid", RealStatistics({}), (options,))

    def isc(logits):
        buffer = FeatureBuffer()
        for batch in logits.split(997):
            buffer.add(batch)
        return metrics.isc(options, ImageStatistics(len(logits), {}, logits=buffer.rows()), comparison)["isc"]

    logits = 3 * gaussian_features(0.0, 1.0, 50_000, 10).float()
    expected = isc_features_to_metric(logits, splits=10, shuffle=False)["inception_score_mean"]
    assert isc(logits) == pytest.approx(expected, rel=1e-12)
    splits = [isc_features_to_metric(split, 1, False)["inception_score_mean"] for split in logits[:7000].split(5000)]
    assert isc(logits[:7000]) == pytest.approx(np.mean(splits), rel=1e-12)


def test_precision_and_recall_equal_those_of_torch_fidelity():
    """The number of feature vectors exceeds one block of the computation."""
    from torch_fidelity.metric_prc import prc_features_to_metric

    samples, real = gaussian_features(0.3, 0.8, 2500, 8).float(), gaussian_features(0.0, 1.0, 1500, 8, 1).float()
    expected = prc_features_to_metric(samples, real, verbose=False, save_cpu_ram=False)
    scores = comparison_with(real, "precision", "recall").score(measure_features(samples))
    assert 0.2 < expected["recall"] < expected["precision"] < 1
    assert scores == {name: pytest.approx(expected[name], abs=1e-6) for name in ("precision", "recall")}


def test_kid_of_inception_features_equals_that_of_torch_fidelity():
    from torch_fidelity.metric_kid import kid_features_to_metric

    samples, real = gaussian_features(0.3, 0.8, 300, 8).float(), gaussian_features(0.0, 1.0, 400, 8, 1).float()
    kid = METRICS.select({"name": "kid", "subsets": 9, "subset_size": 100})
    comparison = Comparison("fid", metrics.statistics_to_store(measure_features(real)), (kid,))
    expected = kid_features_to_metric(
        samples.double(), real.double(), kid_subsets=9, kid_subset_size=100, verbose=False
    )
    assert comparison.score(measure_features(samples))["kid"] == pytest.approx(
        expected["kernel_inception_distance_mean"], rel=1e-12
    )


def test_kid_needs_subsets_of_two_images():
    real = gaussian_features(0.0, 1.0, 100, 2)
    for count, columns in ((3, []), (4, ["kid"])):
        statistics = measure_features(gaussian_features(0.0, 1.0, count, 2))
        assert list(comparison_with(real, "kid").score(statistics)) == columns


def test_kid_is_small_for_equal_distributions_and_ignores_the_scale_of_features():
    real, near, far = (gaussian_features(m, 1.0, 60, 8, seed) for seed, m in enumerate((0.0, 0.0, 1.0)))
    values = {}
    for scale in (1, 100):
        comparison = comparison_with(real * scale, "kid")
        values[scale] = [comparison.score(measure_features(samples * scale))["kid"] for samples in (near, far)]
    assert values[1] == pytest.approx(values[100], rel=1e-4)
    assert abs(values[1][0]) < 0.2 < values[1][1]


def test_features_on_disk_are_read_back_by_index():
    images = np.arange(30, dtype=np.uint8).reshape(10, 1, 1, 3)
    features = images.reshape(10, 3).astype(np.float32)

    def compute_layers(batch):
        return {"features": torch.from_numpy(batch).flatten(1).float()}

    extractor = SimpleNamespace(compute_layers=compute_layers, device=torch.device("cpu"))

    def store(indices):
        return measure(extractor, np.split(images, [4, 8]), {"features"}, indices).features

    stored = store(None)
    assert len(stored) == 10 and np.array_equal(stored[:], features) and np.array_equal(stored[3:7], features[3:7])
    assert np.array_equal(stored[np.array([9, 0, 0])], features[[9, 0, 0]])
    assert np.array_equal(store(np.array([0, 3, 9]))[:], features[[0, 3, 9]])
    assert np.array_equal(store(np.array([5, 9]))[:], features[[5, 9]])
    assert len(metrics.indices_to_store(10)) == 10
    indices = metrics.indices_to_store(10**6)
    assert len(indices) == metrics.MAX_STORED and indices[-1] == 10**6 - 1


def test_the_bootstrap_estimates_the_standard_deviation_over_sample_sets():
    """The standard deviation over resamples of one set is close to that over independent sets."""
    real = gaussian_features(0.0, 1.0, 4000, 4, 99)
    comparison = comparison_with(real, "frechet")
    sets = [measure_features(gaussian_features(0.5, 1.0, 400, 4, seed)) for seed in range(40)]
    expected = np.std([comparison.score(sample_set)["frechet_x"] for sample_set in sets], ddof=1)
    estimates = [metrics.bootstrap(sample_set, comparison, 20, 0) for sample_set in sets[:8]]
    assert np.mean(estimates) == pytest.approx(expected, rel=0.35)


def test_every_metric_needs_measurements_that_exist():
    for name, metric in METRICS.items():
        assert metric.needs and set(metric.needs) <= set(MEASUREMENTS), name
    metrics_of_every_kind = metrics_with_options(["fid", "sfid", "kid", "isc", "clip", "psnr", "validation"])
    assert needs_of_real_images(metrics_of_every_kind) == {"moments", "spatial", "features"}
    with pytest.raises(KairosError, match=r"needs: got .*logit.*, allowed: .*logits"):

        @METRICS.register
        class Misspelled(MetricOptions):
            code: ClassVar[str] = "kairos.evaluation.metrics:isc"
            needs: ClassVar[tuple[str, ...]] = ("features", "logit")

            name: str = "new"

    assert "new" not in METRICS


@pytest.mark.parametrize("columns", [True, "new"])
def test_columns_whose_higher_values_are_better_are_a_tuple(columns):
    with pytest.raises(KairosError, match=r"higher_is_better: got .*, allowed: a tuple of columns"):

        @METRICS.register
        class Better(MetricOptions):
            code: ClassVar[str] = "kairos.evaluation.metrics:isc"
            higher_is_better: ClassVar[Any] = columns

            name: str = "new"

    assert "new" not in METRICS


def test_too_few_images_are_rejected_or_cause_a_warning():
    with pytest.raises(KairosError, match="got 32 images, allowed: more than 32"):
        metrics.check_image_count(32, 32, "evaluation.num_samples")
    assert "10 times" in metrics.check_image_count(33, 32, "x")[0]
    assert metrics.check_image_count(320, 32, "x") == []


def test_statistics_of_real_images_are_computed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    calls = []

    def compute(partial):
        calls.append(1)
        return metrics.statistics_to_store(measure_features(gaussian_features(0.0, 1.0, 100)))

    first = metrics.load_or_compute({"images": "a"}, compute)
    second = metrics.load_or_compute({"images": "a"}, compute)
    assert len(calls) == 1 and first.hash == second.hash and np.array_equal(first.features, second.features)
    metrics.load_or_compute({"images": "b"}, compute)
    assert len(calls) == 2, "other images, other statistics"
    path = next(iter((tmp_path / ".kairos/cache").iterdir()))
    path.write_bytes(path.read_bytes()[:100])
    for name in "ab":
        assert metrics.load_or_compute({"images": name}, compute).hash == first.hash
    assert len(calls) == 3 and "damaged" in capsys.readouterr().err


def test_concurrent_computations_write_one_complete_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    barrier = threading.Barrier(4)
    results = []

    def compute(partial):
        barrier.wait()
        return metrics.statistics_to_store(measure_features(gaussian_features(0.0, 1.0, 2000, 32)))

    threads = [threading.Thread(target=lambda: results.append(metrics.load_or_compute("x", compute))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.hash for result in results}) == 1
    assert len(list((tmp_path / ".kairos/cache").iterdir())) == 1


@pytest.mark.parametrize("timesteps,strata", [(1000, 32), (100, 7), (10, 32), (3, 5), (2, 4)])
def test_strata_cover_every_timestep_exactly_once(timesteps, strata):
    process, intervals = discrete(timesteps), validation.build_strata(timesteps, strata)
    assert intervals[0] == (0, 1 / timesteps) and intervals[-1] == ((timesteps - 1) / timesteps, 1)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(intervals))
    assert len(intervals) == min(strata, timesteps - 2) + 2
    counts = np.zeros(timesteps)
    for first, end in intervals:
        u = validation.spread_over((first, end), 10_000)
        assert u.min() > first and u.max() < end and float(u.mean()) == pytest.approx((first + end) / 2)
        counts += (end - first) * np.bincount(process.times(u), minlength=timesteps) / 10_000
    np.testing.assert_allclose(counts, 1 / timesteps, rtol=0.02)


class Latents:
    """Held-out latents that are all zero, so that x_t is the scaled noise."""

    heldout = np.arange(64)
    shape = (1, 2, 2)

    def load_x0(self, indices, flips=None, noise=None):
        return torch.zeros(len(indices), *self.shape)

    def load_conditions(self, indices):
        return {}


def discrete(timesteps=50, schedule="linear", prediction="epsilon"):
    """Return a process with a noise schedule of T timesteps."""
    return make_process({"name": "discrete", "timesteps": timesteps, "schedule": schedule}, prediction)


def loss_of(network, process=None, seed=0, **settings):
    """Return a process and the validation loss of a network on it."""
    process = process or discrete()
    snapshot = SimpleNamespace(
        process=process, record={"conditions": {}}, model=lambda x, t, conditions: network(process, x, t)
    )
    return process, validation.validation_loss(snapshot, Latents(), LossSettings(64, 6, seed, **settings))


def noise_in(process, x, t):
    """Return the noise in x_t if x0 = 0: x_t divided by the standard deviation of the noise."""
    return x / process.coefficients(t)[1].view(-1, 1, 1, 1)


def test_the_validation_loss_of_known_networks_equals_closed_forms():
    process, result = loss_of(lambda process, x, t: 0 * x)
    assert result["loss_epsilon"] == pytest.approx(1.0, abs=0.1), "predicting nothing leaves the noise's variance"
    _, perfect = loss_of(lambda process, x, t: noise_in(process, x, t).float())
    assert perfect["loss_epsilon"] == pytest.approx(0, abs=1e-8)
    # a constant error of 0.5 is 0.25 at every timestep: the VLB mean is that of c itself, exactly
    _, constant = loss_of(lambda process, x, t: noise_in(process, x, t).float() + 0.5)
    assert constant["loss_epsilon"] == pytest.approx(0.25, rel=1e-5)
    assert constant["vlb"] == pytest.approx(0.25 * process.schedule.vlb.mean(), rel=1e-5)
    without = process.schedule.vlb[:-1].sum() / 50
    assert constant["vlb_without_last"] == pytest.approx(0.25 * without, rel=1e-5)
    rows = constant["per_timestep"]
    assert rows[0]["u"] == [0, 0.02] and rows[0]["t"] == 0 and rows[-1]["u"] == [0.98, 1] and rows[-1]["t"] == 49
    assert sum(row["u"][1] - row["u"][0] for row in rows) == pytest.approx(1)


def test_vlb_of_a_stratum_is_the_mean_of_c_times_the_loss_of_each_image():
    """The product of the mean c and the mean loss differs, if both fall within a stratum."""
    error = lambda t: 1 / (t + 1)  # noqa: E731
    process, result = loss_of(lambda process, x, t: (noise_in(process, x, t) + error(t).view(-1, 1, 1, 1)).float())
    c, t = process.schedule.vlb, np.arange(50)
    assert result["vlb"] == pytest.approx((c * error(t) ** 2).mean(), rel=1e-4)
    row = result["per_timestep"][1]  # timesteps 1 to 8, eight images each
    assert row["vlb"] == pytest.approx((c * error(t) ** 2)[1:9].mean(), rel=1e-4)
    assert abs(row["vlb"] / (c[1:9].mean() * (error(t) ** 2)[1:9].mean()) - 1) > 0.05


@pytest.mark.parametrize("name,first_time", [("edm", 0.002), ("flow", 0.0005), ("vp", 0.0005)])
def test_the_validation_loss_of_a_continuous_process_covers_its_times(name, first_time):
    options = {"sigma_data": 0.5} if name == "edm" else {}
    process = make_process({"name": name, **options}, "epsilon")

    def network(process, x, t):
        if name == "edm":  # the prediction x0 = 0 requires an output that cancels the skip connection
            sigma = (t / process.time_scale * 4).exp().view(-1, 1, 1, 1)
            return -x * process.sigma_data / sigma
        return x if name == "vp" else x / (t / process.time_scale).view(-1, 1, 1, 1)

    _, result = loss_of(network, process)
    rows = result["per_timestep"]
    assert [row["u"] for row in rows][:1] == [[0, 0.001]] and rows[-1]["u"] == [0.999, 1] and len(rows) == 8
    assert rows[0]["t"] == pytest.approx(first_time, rel=0.05) and all(
        a["t"] < b["t"] for a, b in itertools.pairwise(rows)
    )
    if name != "vp":
        quantity = {"edm": "x0", "flow": "velocity"}[name]
        assert result[f"loss_{quantity}"] == pytest.approx(0, abs=1e-5)
    else:
        assert 0 < rows[-1]["loss_epsilon"] < 1e-4 < rows[0]["loss_epsilon"], "x is the noise where no image is left"


def test_the_validation_loss_is_computed_in_the_requested_precision():
    layer = torch.nn.Conv2d(1, 1, 1)
    seen = []
    network = lambda process, x, t: seen.append((x.dtype, layer(x).dtype)) or layer(x)  # noqa: E731
    losses = [loss_of(network, precision=precision)[1]["loss_epsilon"] for precision in ("fp32", "bf16")]
    assert set(seen) == {(torch.float32, torch.float32), (torch.float32, torch.bfloat16)}
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_vlb_without_the_last_timestep_exists_where_that_timestep_dominates():
    """With the cosine schedule, a constant error of epsilon at t = T-1 is nearly the whole VLB, but not one of v."""
    process, result = loss_of(lambda process, x, t: noise_in(process, x, t).float() + 0.5, discrete(schedule="cosine"))
    without = process.schedule.vlb[:-1].sum() / 50
    assert result["vlb_without_last"] == pytest.approx(0.25 * without, rel=1e-5) and without < 0.5 * result["vlb"]
    _, result = loss_of(lambda process, x, t: 0 * x, discrete(schedule="cosine", prediction="v"))
    assert "vlb_without_last" not in result, "it would equal vlb in all shown digits"


@pytest.mark.parametrize(
    "name,prediction,quantity",
    [
        ("discrete", "epsilon", "epsilon"),
        ("discrete", "x0", "x0"),
        ("discrete", "v", "v"),
        ("edm", None, "x0"),
        ("flow", None, "velocity"),
    ],
)
def test_validation_losses_are_named_after_their_quantity(name, prediction, quantity):
    """With x0 = 0 and a prediction that is 0.5 too high, each error is known."""
    options = {"edm": {"sigma_data": 0.5}, "discrete": {"timesteps": 50}}.get(name, {})
    process = make_process({"name": name, **options}, prediction or "epsilon")
    error = 0.5

    def predict(x, t, conditions):
        if name == "edm":  # x0 + error requires an output that cancels the skip connection
            sigma = (t / process.time_scale * 4).exp().view(-1, 1, 1, 1)
            data = process.sigma_data
            root = (sigma**2 + data**2).sqrt()
            return (error - data**2 / root * x) * root / (data * sigma)  # the input x is x_t / root
        if name == "flow":
            return x / (t / process.time_scale).view(-1, 1, 1, 1) + error
        noise = noise_in(process, x, t)
        signal = process.coefficients(t)[0].view(-1, 1, 1, 1)
        return ({"epsilon": noise, "x0": 0 * x, "v": signal * noise}[prediction] + error).float()

    snapshot = SimpleNamespace(process=process, record={"conditions": {}}, model=predict)
    arguments = snapshot, Latents(), LossSettings(64, 6, 0)
    losses = validation.validation_loss(*arguments)
    assert losses[f"loss_{quantity}"] == pytest.approx(error**2, rel=2e-3)
    assert validation.mlperf8(*arguments)[f"mlperf8_{quantity}"] == pytest.approx(error**2, rel=2e-2)

    # errors of epsilon that this error implies, at the middles of thousands of equal intervals
    u = (torch.arange(64_000, dtype=torch.float64) + 0.5) / 64_000
    signal, noise = process.coefficients(process.times(u))
    factor = {"epsilon": signal**0, "x0": signal / noise, "v": signal, "velocity": signal}[quantity] ** 2
    epsilon_loss = validation.epsilon_loss(*arguments)["loss_epsilon"]
    assert epsilon_loss == pytest.approx(error**2 * float(factor.mean()), rel=0.05)
    cells = (u * len(process.schedule.vlb)).long().numpy()
    expected_vlb = error**2 * float((torch.from_numpy(process.schedule.vlb[cells]) * factor).mean())
    assert losses["vlb"] == pytest.approx(expected_vlb, rel=0.05)


def test_validation_losses_are_equal_for_equal_seeds():
    losses = [loss_of(lambda process, x, t: 0 * x, seed=seed)[1]["loss_epsilon"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_the_error_of_epsilon_is_zero_for_every_perfect_prediction():
    for prediction in ("epsilon", "x0", "v"):
        process = discrete(prediction=prediction)

        def network(x, t, conditions, process=process):
            epsilon = noise_in(process, x, t)
            v = process.coefficients(t)[0].view(-1, 1, 1, 1) * epsilon
            return {"epsilon": epsilon, "x0": 0 * x, "v": v}[process.prediction].float()

        snapshot = SimpleNamespace(process=process, record={"conditions": {}}, model=network)
        loss = validation.epsilon_loss(snapshot, Latents(), LossSettings(64, 6, 0))["loss_epsilon"]
        assert loss == pytest.approx(0, abs=1e-8)
