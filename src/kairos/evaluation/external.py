"""Real images from outside: an npz of images, or of the mean and covariance of features, as others publish them.

EDM's and U-ViT's files hold `mu` and `sigma`; ADM's hold them too, of the whole data set, with `mu_s` and `sigma_s` of
the spatial features and, as `arr_0`, 10,000 images for precision and recall.
"""

import zipfile
from pathlib import Path

import numpy as np

from kairos.errors import KairosError
from kairos.evaluation import metrics
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.metrics import Statistics
from kairos.evaluation.moments import LAYERS, in_batches, measure
from kairos.files import sha256_file
from kairos.progress import say

_IMAGES = {"images", "arr_0"}


def arrays_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays in an npz file by name, from their headers.

    Raises:
        KairosError: no such file, or no npz.
    """
    try:
        with zipfile.ZipFile(path) as file:
            shapes = {}
            for member in file.namelist():
                with file.open(member) as content:
                    version = np.lib.format.read_magic(content)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shapes[member.removesuffix(".npy")] = read(content)[0]
            return shapes
    except FileNotFoundError:
        raise KairosError(f"{path}: no such file; allowed: an npz of images, or of mu and sigma") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise KairosError(f"{path}: cannot be read as npz ({error})") from None


def check(path: Path, width: int | None, needs: set[str], where: str) -> None:
    """Whether a file has what the metrics need, from its headers alone.

    Args:
        width: number of features; None where it is not known yet.
        needs: what is measured, see `moments.measure`.
        where: what messages call the file.

    Raises:
        KairosError: features of another width, or something that a metric needs is not in it.
    """
    shapes = arrays_of(path)
    sigma = shapes.get("sigma")
    if sigma is not None and width is not None and sigma != (width, width):
        raise KairosError(
            f"{where}: sigma in {path} has shape {sigma}, allowed: {(width, width)}, the extractor's features"
        )
    if _IMAGES & set(shapes):
        return
    has = {"moments"} if {"mu", "sigma"} <= set(shapes) else set()
    has |= {"spatial"} if {"mu_s", "sigma_s"} <= set(shapes) else set()
    missing = needs - has - {"logits", "milestone"}
    if missing:
        raise KairosError(
            f"{where}: {path} holds {', '.join(shapes) or 'nothing'}; the metrics need {', '.join(sorted(missing))} of "
            "real images; allowed: an npz with images (or arr_0), or other evaluation.metrics"
        )


def statistics(path: Path, extractor: Extractor, needs: set[str]) -> Statistics:
    """Statistics of a file, cached by its content: published moments where it holds them, else those of its images.

    Raises:
        KairosError: see `check`; or too few images for the extractor.
    """
    from kairos.sampling.sample import read_samples

    check(path, extractor.width, needs, "reference")
    digest = sha256_file(path)
    shapes = arrays_of(path)
    with np.load(path, allow_pickle=False) as file:
        published = metrics.moments_in(file)
    published = {name: value for name, value in published.items() if name in {LAYERS.get(need) for need in needs}}
    rest = {need for need in needs if LAYERS.get(need) not in published} - {"logits", "milestone"}
    if not rest:
        return Statistics(published)

    def compute() -> Statistics:
        images, _ = read_samples(path)
        return metrics.statistics_of(measure(extractor, in_batches(images, range(len(images))), rest))

    count = next(shapes[name][0] for name in shapes if name in _IMAGES)
    if "moments" in rest:
        for warning in metrics.check_number(count, extractor.width, str(path)):
            say(f"warning: {path}: {warning}")
    found = metrics.cached({"images": digest, "extractor": extractor.hash, "needs": sorted(rest)}, compute)
    return Statistics({**found.moments, **published}, found.features, 0 if published else found.count)
