"""DINOv2 as feature extractor: the published preprocessing and the class token, with random weights."""

import numpy as np
import pytest
import torch

from kairos.evaluation import extractors, metrics
from kairos.evaluation.measurements import iterate_rows, measure
from kairos.evaluation.settings import DinoOptions, FdDinoOptions
from kairos_timesteps.errors import KairosError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The folder of a small DINOv2 network with random weights."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=518, patch_size=14
    )
    folder = tmp_path_factory.mktemp("dinov2")
    transformers.Dinov2Model(config).save_pretrained(folder)
    return folder


def test_features_equal_the_class_token_of_the_published_preprocessing(network, tmp_path):
    from torchvision.transforms import functional

    record = extractors.build_extractor(DinoOptions(path=str(network)), None, tmp_path / "x")
    assert record["metric"] == "fd_dinov2" and record["features"] == 24 and str(network) not in str(record["files"])
    opened = extractors.open_extractor(tmp_path / "x")
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    pixels = [
        functional.resize(functional.to_pil_image(image), [224, 224], functional.InterpolationMode.BICUBIC)
        for image in images
    ]
    normal = [
        functional.normalize(functional.to_tensor(p), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]) for p in pixels
    ]
    with torch.no_grad():
        model = transformers.Dinov2Model.from_pretrained(network).eval()
        token = model.layernorm(model.encoder(model.embeddings(torch.stack(normal))).last_hidden_state)[:, 0]
    torch.testing.assert_close(opened.compute_layers(images)["features"], token, rtol=1e-4, atol=1e-5)
    grey = images[..., :1]
    features = [opened.compute_layers(batch)["features"] for batch in (grey, grey.repeat(3, axis=3))]
    torch.testing.assert_close(*features)
    statistics = measure(opened, iterate_rows(np.concatenate([images] * 8), range(40)), {"moments"})
    comparison = metrics.Comparison("fd_dinov2", metrics.statistics_to_store(statistics), (FdDinoOptions(),))
    assert comparison.score(statistics) == {"fd_dinov2": pytest.approx(0, abs=1e-5)}


def test_a_missing_or_different_network_is_reported_with_the_field_to_set(tmp_path):
    with pytest.raises(KairosError, match=r"dinov2 needs the network .*nowhere .*evaluation\.extractor\.path"):
        extractors.build_extractor(DinoOptions(path=str(tmp_path / "nowhere")), None, tmp_path / "x")
    other = transformers.BertModel(
        transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    other.save_pretrained(tmp_path / "bert")
    with pytest.raises(KairosError, match=r"got a bert in .*, allowed: a dinov2"):
        extractors.build_extractor(DinoOptions(path=str(tmp_path / "bert")), None, tmp_path / "x")


def test_check_rejects_a_network_that_is_missing_and_cannot_be_downloaded(tmp_path, network, monkeypatch, capsys):
    from kairos.cli import main

    file = tmp_path / "x.yaml"
    results = {}
    for path, offline in (
        (str(tmp_path / "nowhere"), "0"),
        ("facebook/dinov2-large", "1"),
        ("facebook/dinov2-large", "0"),
        (str(network), "1"),
    ):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        extractor = f"{{name: dinov2, path: {path}}}"
        file.write_text(
            f"experiment: x\nmethods: {{u: {{}}}}\nevaluation: {{extractor: {extractor}, num_samples: 1100}}\n"
        )
        results[path, offline] = main(["check", str(file)]), "".join(capsys.readouterr())
    (missing, missing_output), (offline, offline_output), (hub, hub_output), (local, _) = results.values()
    assert missing == offline == 2
    assert "the folder does not exist" in missing_output and "HF_HUB_OFFLINE is set" in offline_output
    assert hub == local == 0 and "will download facebook/dinov2-large" in hub_output


def test_check_rejects_fewer_images_than_features(tmp_path, network, monkeypatch, capsys):
    from kairos.cli import main

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    file = tmp_path / "x.yaml"

    def check(path, num_samples):
        extractor = f"{{name: dinov2, path: {path}}}"
        evaluation = f"{{extractor: {extractor}, num_samples: {num_samples}}}"
        file.write_text(f"experiment: x\nmethods: {{u: {{}}}}\nevaluation: {evaluation}\n")
        return main(["check", str(file)]), "".join(capsys.readouterr())

    status, output = check("facebook/dinov2-large", 450)
    assert status == 2 and "evaluation.num_samples: got 450 images a set, allowed: more than 1024" in output
    assert check("facebook/dinov2-large", 1025)[0] == 0
    status, output = check(network, 24)
    assert status == 2 and "evaluation.num_samples: got 24 images a set, allowed: more than 24" in output
    for missing in ("./missing", "~/missing", "owner/na--me", "owner/name.git", "owner/name-", "o/" + 97 * "n"):
        status, output = check(missing, 2000)
        assert status == 2 and "the folder does not exist" in output
    assert check(network, 25)[0] == check("someone/dinov2-tiny", 25)[0] == 0  # the width of the second is unknown
