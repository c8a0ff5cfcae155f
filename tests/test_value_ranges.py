"""One rule for a data set converts stored values to 0 ... 255; damaged, dark and bright images are reported."""

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from kairos.cli import main
from kairos.data.dataset import open_dataset
from kairos.data.linked_images import delete_temporary_copy
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.files import DamagedError
from kairos.sampling.samples_file import open_samples
from kairos_timesteps.errors import ConfigError, KairosError
from test_data import config, folder_config, write_images
from test_tables import hub_cache  # noqa: F401  (a fixture)


def ramp(low: float, high: float, kind: type, count: int = 64) -> np.ndarray:
    return np.linspace(low, high, count).astype(kind).reshape(8, -1)


def write_arrays(folder: Path, arrays: list[np.ndarray], suffix: str = "tiff") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{index:02d}.{suffix}")
    return folder


def encode_colour_png(values: np.ndarray) -> bytes:
    """Return a PNG of 16 bits per channel from uint16 (height, width, 3), which PIL can read but not write."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)  # 0: the row is not filtered
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def prepare_pixels(settings: DatasetConfig, out: Path) -> np.ndarray:
    prepare(settings, out)
    return open_dataset(out).images[:]


# floats


def test_floats_outside_of_the_range_are_rejected_with_the_values_of_the_whole_data_set(tmp_path):
    arrays = [ramp(0.5, high, np.float32) for high in (0.95, 0.99, 1.0, 1.01, 1.05, 1.1)]
    folder = write_arrays(tmp_path / "in", arrays)
    with pytest.raises(ConfigError, match=r"dataset\.value_range: got null.*3 of 6.*03\.tiff \(0\.5 to 1\.01\).*1\.1"):
        prepare(folder_config(folder), tmp_path / "out")
    assert not (tmp_path / "out" / "record.json").exists()


@pytest.mark.parametrize("value_range", [[0, 1.1], [-1, 1.5], [0, 2]])
def test_all_floats_of_a_data_set_are_scaled_by_one_range(value_range, tmp_path):
    arrays = [ramp(0.5, high, np.float32) for high in (0.6, 1.0, 1.1)]
    folder = write_arrays(tmp_path / "in", arrays)
    pixels = prepare_pixels(folder_config(folder, value_range=value_range, color="grey"), tmp_path / "out")
    low, high = value_range
    expected = (np.stack(arrays) - low) / (high - low) * 255
    assert np.abs(pixels[..., 0] - expected).max() <= 0.5 + 1e-4


def test_dark_floats_stay_dark_if_others_are_bright(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, 0.5, np.float32), ramp(0, 1, np.float32)])
    pixels = prepare_pixels(folder_config(folder, color="grey"), tmp_path / "out")
    assert pixels.max(axis=(1, 2, 3)).tolist() == [128, 255]


def test_rounding_errors_of_floats_are_accepted(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(-1e-6, 1 + 1e-6, np.float32)] * 2)
    pixels = prepare_pixels(folder_config(folder), tmp_path / "out")
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_floats_to_65535_are_rejected_with_a_range_that_prepares_them(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, 65535, np.float32)] * 2)
    with pytest.raises(ConfigError, match=r"\[0, 65535\]"):
        prepare(folder_config(folder), tmp_path / "out")
    pixels = prepare_pixels(folder_config(folder, value_range=[0, 65535], color="grey"), tmp_path / "out")
    assert np.abs(pixels[0, :, :, 0] - ramp(0, 255, np.float64)).max() <= 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_not_finite_make_an_image_broken(value, tmp_path):
    arrays = [ramp(0, 1, np.float32) for _ in range(4)]
    arrays[2][3, 3:6] = value
    folder = write_arrays(tmp_path / "in", arrays)
    with pytest.raises(KairosError, match=r"02\.tiff is broken \(3 of 64 pixels"):
        prepare(folder_config(folder), tmp_path / "out")
    assert prepare(folder_config(folder, broken="skip"), tmp_path / "out")["skipped"] == ["02.tiff"]


# integers of more than 8 bits


@pytest.mark.parametrize(
    ("bits", "suffix", "kind"),
    [(12, "png", np.uint16), (10, "tiff", np.uint16), (14, "tiff", ">u2"), (8, "tiff", np.int32)],
)
def test_integers_of_fewer_than_16_bits_are_rejected_with_their_range(bits, suffix, kind, tmp_path):
    white = 2**bits - 1
    folder = write_arrays(tmp_path / "in", [ramp(0, white, kind), ramp(0, white // 2, kind)], suffix)
    with pytest.raises(ConfigError, match=rf"dataset\.value_range.*\[0, {white}\].*\[0, 65535\]"):
        prepare(folder_config(folder), tmp_path / "out")
    pixels = prepare_pixels(folder_config(folder, value_range=[0, white]), tmp_path / "out")
    assert pixels.max(axis=(1, 2, 3)).tolist() == [255, 127]
    dark = prepare_pixels(folder_config(folder, value_range=[0, 65535]), tmp_path / "dark")
    assert dark.max() == round(white / 257)


def test_one_bright_image_shows_that_integers_have_16_bits(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, 4095, np.uint16), ramp(0, 65535, np.uint16)], "png")
    pixels = prepare_pixels(folder_config(folder), tmp_path / "out")
    assert pixels.max(axis=(1, 2, 3)).tolist() == [16, 255]


@pytest.mark.parametrize("values", [ramp(0, 100_000, np.int32), ramp(-5, 60_000, np.int32)])
def test_integers_outside_of_16_bits_are_rejected(values, tmp_path):
    folder = write_arrays(tmp_path / "in", [values] * 2)
    with pytest.raises(ConfigError, match=r"dataset\.value_range.*00\.tiff"):
        prepare(folder_config(folder), tmp_path / "out")


def test_every_integer_of_16_bits_is_rounded_to_the_nearest_level(tmp_path):
    values = np.arange(65536).astype(np.uint16).reshape(256, 256)
    folder = write_arrays(tmp_path / "in", [values] * 2)
    pixels = prepare_pixels(folder_config(folder, color="grey"), tmp_path / "out")
    assert np.array_equal(pixels[0, :, :, 0], (values.astype(int) + 128) // 257)


def test_colour_of_16_bits_with_small_values_is_rejected(tmp_path):
    (tmp_path / "in").mkdir()
    values = np.random.default_rng(0).integers(0, 4096, (8, 8, 3))
    for index in range(2):
        (tmp_path / "in" / f"{index}.png").write_bytes(encode_colour_png(values))
    with pytest.raises(ConfigError, match=r"dataset\.value_range.*colour"):
        prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"dataset\.value_range.*colour"):  # PIL reads the upper 8 bits alone
        prepare(folder_config(tmp_path / "in", value_range=[0, 4095]), tmp_path / "out")
    prepare(folder_config(tmp_path / "in", value_range=[0, 65535]), tmp_path / "out")


def test_bright_colour_of_16_bits_is_accepted(tmp_path):
    (tmp_path / "in").mkdir()
    values = np.random.default_rng(0).integers(0, 65536, (8, 8, 3))
    for index in range(2):
        (tmp_path / "in" / f"{index}.png").write_bytes(encode_colour_png(values))
    assert np.array_equal(prepare_pixels(folder_config(tmp_path / "in"), tmp_path / "out")[0], values // 256)


# one rule for all images, from every source


def test_a_range_is_not_applied_to_images_of_8_bits(tmp_path):
    folder = write_images(tmp_path / "in", 3)
    write_arrays(folder, [ramp(0, 4095, np.uint16)])
    with pytest.raises(ConfigError, match=r"dataset\.value_range: got \[0, 4095\].*3 of 4.*000\.png"):
        prepare(folder_config(folder, resolution=8, value_range=[0, 4095]), tmp_path / "out")


def test_types_may_be_mixed_without_a_range(tmp_path):
    folder = write_images(tmp_path / "in", 3)
    write_arrays(folder, [ramp(0, 65535, np.uint16), ramp(0, 1, np.float32)])
    record = prepare(folder_config(folder), tmp_path / "out")
    assert sorted(values["count"] for values in record["values"]) == [1, 1, 3]


def test_held_out_images_follow_the_rule(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, 1, np.float32)] * 2)
    heldout = write_arrays(tmp_path / "heldout", [ramp(0, 1.3, np.float32)] * 2)
    with pytest.raises(ConfigError, match=r"2 of 4.*1\.3"):
        prepare(folder_config(folder, heldout=str(heldout)), tmp_path / "out")
    settings = folder_config(folder, heldout=str(heldout), value_range=[0, 1.3], color="grey")
    assert prepare_pixels(settings, tmp_path / "out").max(axis=(1, 2, 3)).tolist() == [196, 196, 255, 255]


def encode_tiff(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(values).save(content, "tiff")
    return content.getvalue()


@pytest.mark.parametrize("source", ["zip", "parquet"])
def test_archives_and_tables_follow_the_rule(source, tmp_path, hub_cache):  # noqa: F811
    import datasets

    path = tmp_path / f"images.{source}"
    contents = [encode_tiff(ramp(0, high, np.float32)) for high in (0.9, 1.2)]
    if source == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for index, content in enumerate(contents):
                archive.writestr(f"{index}.tiff", content)
    else:
        rows = [{"bytes": content, "path": None} for content in contents]
        features = datasets.Features({"image": datasets.Image(decode=False)})
        datasets.Dataset.from_dict({"image": rows}, features=features).to_parquet(str(path))
    settings = {"source": source, "path": str(path), "color": "grey", "heldout": 0.0}
    with pytest.raises(ConfigError, match=r"dataset\.value_range.*1 of 2.*1\.2"):
        prepare(config(**settings), tmp_path / "out")
    pixels = prepare_pixels(config(**settings, value_range=[0, 1.2]), tmp_path / "out")
    assert pixels.max(axis=(1, 2, 3)).tolist() == [191, 255]


def test_linked_images_have_the_pixels_of_copied_ones(tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, high, np.float32) for high in (0.9, 1.2)])
    pixels = {}
    for store in ("copy", "refer"):
        prepare(folder_config(folder, store=store, value_range=[0, 1.2]), tmp_path / store)
        delete_temporary_copy(tmp_path / store)
        pixels[store] = open_dataset(tmp_path / store).images[:]
    assert np.array_equal(pixels["copy"], pixels["refer"])
    damaged = ramp(0, 0.9, np.float32)
    damaged[0, 0] = np.nan  # would become the 0 that it replaces
    write_arrays(folder, [damaged])
    with pytest.raises(DamagedError, match=r"00\.tiff"):
        open_dataset(tmp_path / "refer").images[0]


@pytest.mark.parametrize("value_range", [[1, 0], [0, 0], [0], [0, 1, 2], "auto", [0, float("nan")]])
def test_an_invalid_range_is_rejected(value_range, tmp_path):
    with pytest.raises(ValueError, match="value_range"):
        folder_config(tmp_path, value_range=value_range)


def test_digits_have_no_range():
    with pytest.raises(ValueError, match=r"dataset\.value_range"):
        config(value_range=[0, 16])


def test_generated_images_of_floats_are_rejected(tmp_path):
    np.savez(tmp_path / "adm.npz", arr_0=np.zeros((4, 8, 8, 3), np.float32))
    with pytest.raises(KairosError, match=r"adm\.npz: images: got float32.*uint8"):
        open_samples(tmp_path / "adm.npz")


# reports


def test_nearly_black_and_white_images_are_named(tmp_path, capsys):
    folder = write_images(tmp_path / "in", 5)
    black, white = np.zeros((8, 8), np.uint8), np.full((8, 8), 250, np.uint8)
    for index in range(12):
        Image.fromarray(black + index).save(folder / f"black{index:02d}.png")
    Image.fromarray(white).save(folder / "white.png")
    record = prepare(folder_config(folder), tmp_path / "out")
    dark, bright = record["warnings"]
    assert "12 of 18 images" in dark and "black" in dark and "black00.png" in dark and "black11.png" not in dark
    assert "1 of 18 images" in bright and "white" in bright and "white.png" in bright
    printed = capsys.readouterr()
    assert dark in printed.err + printed.out and bright in printed.err + printed.out


def test_bright_strokes_on_black_are_not_nearly_black(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    pixels = np.zeros((28, 28), np.uint8)
    pixels[6:22, 14] = 255
    for index in range(2):
        Image.fromarray(pixels).save(folder / f"{index}.png")
        Image.fromarray(255 - pixels).save(folder / f"inverse{index}.png")
    assert prepare(folder_config(folder), tmp_path / "out")["warnings"] == []


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Function that runs a kairos command on a folder of images, and returns its exit status and its output."""
    monkeypatch.chdir(tmp_path)

    def call(command: str, folder: Path, *arguments: str, **dataset) -> tuple[int, str]:
        values = {
            "experiment": "x",
            "dataset": {"source": "folder", "path": str(folder), **dataset},
            "model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2},
            "training": {"milestones": [10], "batch_size": 4},
            "methods": {"a": {}},
            "evaluation": {"extractor": {"name": "selfsupervised", "features": 8}},
        }
        Path("x.yaml").write_text(yaml.safe_dump(values))
        status = main([command, *arguments, "x.yaml"])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return call


def test_check_prints_values_and_scaling(check, tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0.25, 1, np.float32)] * 20)
    status, output = check("check", folder)
    assert status == 0 and "values: 20 images of floats (0.25 to 1), of which 0 becomes black and 1 white" in output
    status, output = check("check", folder, value_range=[0, 2])
    assert status == 0 and "of which 0 becomes black and 2 white" in output
    status, output = check("check", tmp_path / "absent")
    assert status == 0 and "values: 8 bits as stored; integers of more bits: 0 black, 65535 white" in output
    status, output = check("check", write_images(tmp_path / "eight", 20))
    assert status == 0 and "values: 20 images of 8 bits" in output


def test_check_rejects_values_that_prepare_would_reject(check, tmp_path):
    floats = write_arrays(tmp_path / "floats", [ramp(0.5, 1.1, np.float32)] * 20)
    integers = write_arrays(tmp_path / "integers", [ramp(0, 4095, np.uint16)] * 20)
    for folder, suggestion in ((floats, "1.1"), (integers, "[0, 4095]")):
        status, output = check("check", folder)
        assert status == 2 and "dataset.value_range" in output and suggestion in output
    damaged = ramp(0, 1, np.float32)
    damaged[0, 0] = np.nan
    status, output = check("check", write_arrays(tmp_path / "damaged", [damaged] * 20))
    assert status == 2 and "1 of 64 pixels" in output and "00.tiff" in output


def test_check_only_warns_of_small_integers_if_it_has_not_read_all_images(check, tmp_path, monkeypatch):
    monkeypatch.setattr("kairos.data.source_statistics._MOST_MEASURED", 10)
    folder = write_arrays(tmp_path / "in", [ramp(0, 4095, np.uint16)] * 19 + [ramp(0, 65535, np.uint16)])
    status, output = check("check", folder)
    assert status == 0 and "warning: dataset.value_range" in output
    assert "values: 20 grey images of more than 8 bits" in output
    assert check("prepare", folder, "--config")[0] == 0


def test_prepare_prints_values_and_check_prints_the_warnings_of_the_prepared_data_set(check, tmp_path):
    folder = write_arrays(tmp_path / "in", [ramp(0, 1, np.float32)] * 20 + [np.zeros((8, 8), np.float32)])
    status, output = check("prepare", folder, "--config")
    assert status == 0 and "values: 21 images of floats (0 to 1), of which 0 becomes black and 1 white" in output
    (warning,) = json.loads(Path("results/x/dataset/record.json").read_text())["warnings"]
    assert warning in output
    status, output = check("check", folder)
    assert status == 0 and warning in output
