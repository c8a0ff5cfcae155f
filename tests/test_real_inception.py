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


class Images(torch.utils.data.Dataset):
    """Images as torch-fidelity takes them: uint8 (3, height, width)."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index].transpose(2, 0, 1).copy())


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
def plain_weights(weights, tmp_path_factory):
    """The weights as a file that torch-fidelity reads."""
    if weights.suffix == ".pth":
        return weights
    network = _empty_network()
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(_name_layers(torch.jit.load(weights).state_dict(), network.state_dict()), path)
    return path


def _empty_network():
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Empty(FeatureExtractorInceptionV3):
        def load_state_dict(self, *arguments, **keywords):
            return None

    import io

    buffer = io.BytesIO()
    torch.save({}, buffer)
    buffer.seek(0)
    return Empty("empty", ["2048"], feature_extractor_weights_path=buffer, verbose=False)


def two_sets():
    """Return two sets of images, uint8 (n, 32, 32, 3): real ones, and others with noise."""
    images = np.stack([image for image, _ in zip(iterate_images(), range(2 * IMAGES))])
    noise = np.random.default_rng(0).integers(-12, 13, images[:IMAGES].shape)
    return images[IMAGES:], (images[:IMAGES] + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", ["colour", "grey", "large"])
def test_metrics_equal_those_of_torch_fidelity(kind, extractor, plain_weights):
    from torch_fidelity import calculate_metrics

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

    as_colour = {name: np.broadcast_to(images, (*images.shape[:3], 3)) for name, images in
                 (("input1", generated), ("input2", real))}  # fmt: skip
    expected = calculate_metrics(
        **{name: Images(images) for name, images in as_colour.items()},
        cuda=False, fid=True, kid=True, prc=True, kid_subsets=10, kid_subset_size=len(real) // 2,
        feature_extractor_weights_path=str(plain_weights), cache=False, verbose=False,
    )  # fmt: skip
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
