"""Real images from outside: an npz of images, or of the mean and covariance of features, as others publish them.

EDM's and U-ViT's files hold `mu` and `sigma`; ADM's hold them too, of the whole data set, with `mu_s` and `sigma_s` of
the spatial features and, as `arr_0`, 10,000 images for precision and recall.
"""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kairos.errors import KairosError
from kairos.files import sha256_file

if TYPE_CHECKING:  # `check` serves commands that start without torch
    from kairos.evaluation.extractors import Extractor
    from kairos.evaluation.metrics import Statistics

_IMAGES = {"images", "arr_0"}
PUBLISHED = {"moments": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # by what metrics need


def check(path: Path, width: int | None, needs: set[str], where: str) -> dict[str, tuple[str, str]]:
    """Whether a file has what the metrics need; gives the names of those published moments in it that they do.

    Args:
        width: number of features; None where it is not known yet.
        needs: what is measured of real images, see `moments.measure`.
        where: what messages call the file.

    Raises:
        KairosError: no npz, features of another width, or something that a metric needs is not in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            sigma = file["sigma"].shape if "sigma" in names else None
    except FileNotFoundError:
        raise KairosError(f"{where}: {path}: no such file; allowed: an npz of images, or of mu and sigma") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:  # not only npz are loaded
        raise KairosError(f"{where}: {path}: cannot be read as npz ({error})") from None
    if sigma is not None and width is not None and sigma != (width, width):
        raise KairosError(
            f"{where}: sigma in {path} has shape {sigma}, allowed: {(width, width)}, the extractor's features"
        )
    published = {need: pair for need, pair in PUBLISHED.items() if need in needs and names.issuperset(pair)}
    missing = needs - published.keys()
    if missing and not _IMAGES & names:
        raise KairosError(
            f"{where}: {path} holds {', '.join(sorted(names)) or 'nothing'}; the metrics need "
            f"{', '.join(sorted(missing))} of real images; allowed: an npz with images (or arr_0), or other metrics"
        )
    return published


def statistics(path: Path, extractor: "Extractor", needs: set[str]) -> "Statistics":
    """Statistics of a file, cached by its content: published moments where it holds them, else those of its images.

    Raises:
        KairosError: see `check`; or too few images for the extractor.
    """
    from kairos.evaluation import metrics
    from kairos.evaluation.moments import LAYERS, in_batches, measure
    from kairos.sampling.sample import read_samples

    published = {LAYERS[need]: pair for need, pair in check(path, extractor.width, needs, "reference").items()}
    with np.load(path, allow_pickle=False) as file:
        moments = {
            layer: (file[mean].astype(float), file[sigma].astype(float)) for layer, (mean, sigma) in published.items()
        }
    rest = {need for need in needs if LAYERS.get(need) not in moments}
    if not rest:
        return metrics.Statistics(moments)
    images, _ = read_samples(path)
    if "moments" in rest:
        metrics.check_number(len(images), extractor.width, str(path))
    parts = {"images": sha256_file(path), "extractor": extractor.hash, "needs": sorted(rest)}
    batches = in_batches(images, range(len(images)))
    found = metrics.cached(parts, lambda: metrics.statistics_of(measure(extractor, batches, rest)))
    return metrics.Statistics({**found.moments, **moments}, found.features, 0 if moments else found.count)
