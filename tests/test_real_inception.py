"""The published network: kairos' metrics equal those of torch-fidelity on the same real images."""

import numpy as np
import pytest
import torch
from frechet import iterate_images

from kairos.evaluation import extractors, metrics
from kairos.evaluation.inception import _name_layers
from kairos.evaluation.inception_weights import default_path, download_weights
from kairos.evaluation.measurements import iterate_rows, measure
from kairos.evaluation.settings import (
    FidOptions,
    InceptionOptions,
    KidOptions,
    PrecisionOptions,
    RecallOptions,
    SfidOptions,
)
from kairos_timesteps.errors import KairosError

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
IMAGES = 300  # of each of the two sets


@pytest.fixture(scope="module")
def weights():
    """Path of the published weights, which are downloaded once for the machine."""
    if not default_path().is_file():
        try:
            download_weights()
        except KairosError as error:
            pytest.skip(f"the published weights are out of reach: {error}")
    return default_path()


@pytest.fixture(scope="module")
def extractor(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extractor")
    extractors.build_extractor(InceptionOptions(path=str(weights)), None, folder)
    return extractors.open_extractor(folder)


@pytest.fixture(scope="module")
def plain_network(weights):
    """torch-fidelity's network with the published weights."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Unloaded(FeatureExtractorInceptionV3):
        def load_state_dict(self, *arguments, **keywords):
            return None

    network = Unloaded("published", ["2048"], feature_extractor_weights_path=str(weights), verbose=False)
    if weights.suffix == ".pth":
        state = torch.load(weights)
    else:
        state = _name_layers(torch.jit.load(weights).state_dict(), network.state_dict())
    torch.nn.Module.load_state_dict(network, state)
    return network


def plain_features(network, images):
    """Return torch-fidelity's features (n, 2048) of images, uint8 (n, height, width, 1 or 3)."""
    colour = torch.from_numpy(np.broadcast_to(images, (*images.shape[:3], 3)).transpose(0, 3, 1, 2).copy())
    with torch.inference_mode():
        return torch.cat([network(batch)[0] for batch in colour.split(20)])


def two_sets():
    """Return two sets of images, uint8 (n, 32, 32, 3): real ones, and others with noise."""
    images = np.stack([image for image, _ in zip(iterate_images(), range(2 * IMAGES))])
    noise = np.random.default_rng(0).integers(-12, 13, images[:IMAGES].shape)
    return images[IMAGES:], (images[:IMAGES] + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", ["colour", "grey", "large"])
def test_metrics_equal_those_of_torch_fidelity(kind, extractor, plain_network):
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    real, generated = two_sets()
    if kind == "grey":
        real, generated = real[..., :1], generated[..., :1]
    if kind == "large":  # above the network's 299 pixels
        real, generated = (np.repeat(np.repeat(images[:40], 11, 1), 11, 2) for images in (real, generated))
    kid = KidOptions(subsets=10, subset_size=len(real) // 2)
    selected = (FidOptions(), SfidOptions(), kid, PrecisionOptions(), RecallOptions())
    needs = {need for metric in selected for need in metric.needs}
    stored = metrics.statistics_to_store(measure(extractor, iterate_rows(real, range(len(real))), needs))
    statistics = measure(extractor, iterate_rows(generated, range(len(generated))), needs)
    scores = metrics.Comparison("fid", stored, selected).score(statistics)

    generated_features, real_features = (plain_features(plain_network, images) for images in (generated, real))
    expected = fid_statistics_to_metric(
        *map(fid_features_to_statistics, (generated_features, real_features)), verbose=False
    )
    options = {"kid_subsets": kid.subsets, "kid_subset_size": kid.subset_size, "verbose": False}
    expected |= kid_features_to_metric(generated_features, real_features, **options)
    expected |= prc_features_to_metric(generated_features, real_features, verbose=False)
    assert scores["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-3)
    assert scores["kid"] == pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-3, abs=1e-6)
    assert scores["precision"] == pytest.approx(expected["precision"], abs=2 / len(real))
    assert scores["recall"] == pytest.approx(expected["recall"], abs=2 / len(real))

    # torch-fidelity has no sFID: numpy's moments and scipy's root of the spatial features
    from scipy.linalg import sqrtm

    spatial = []
    for images in (real, generated):
        layers = [
            extractor.compute_layers(images[start : start + 20])["spatial"] for start in range(0, len(images), 20)
        ]
        spatial.append(torch.cat(layers).double().numpy()[:, ::20])  # some of the features: the root takes minutes
    assert spatial[0].shape[1] == 102
    (m1, c1), (m2, c2) = ((values.mean(0), np.cov(values, rowvar=False)) for values in spatial)
    distance = ((m1 - m2) ** 2).sum() + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
    part = metrics.RealStatistics({"spatial": (m1, c1)})
    assert metrics.frechet_distance((m2, c2), part, "spatial") == pytest.approx(distance, rel=1e-3, abs=1e-3)
    assert scores["sfid"] > 0


def test_features_equal_those_of_the_package_s_own_program(extractor, weights):
    if weights.suffix == ".pth":
        pytest.skip("the weights are those of the release, which contain no program")
    images = np.random.default_rng(0).integers(0, 256, (2, 299, 299, 3), dtype=np.uint8)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float()
    expected = torch.jit.load(weights)((pixels - 128) / 128).flatten(1)
    computed = extractor.compute_layers(images)["features"]
    assert (computed - expected).abs().max() < 1e-5 * expected.abs().max()
