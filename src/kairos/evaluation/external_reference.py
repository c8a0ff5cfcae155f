"""Real images from outside: an npz of images, or of the mean and covariance of features, as others publish them.

EDM's and U-ViT's files hold `mu` and `sigma`; ADM's hold them too, of the whole data set, with `mu_s` and `sigma_s` of
the spatial features and, as `arr_0`, 10,000 images for precision and recall.
"""

import zipfile
from pathlib import Path

import numpy as np

from kairos_timesteps.errors import KairosError

_IMAGES = {"images", "arr_0"}
PUBLISHED = {"moments": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # by what metrics need


def read_moments(
    path: Path, width: int | None, needs: set[str], where: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Those published moments in a file that metrics need; the file has what else they need.

    Args:
        path: of the file.
        width: number of features; None where it is not known yet.
        needs: what is measured of real images, see `moments.measure`.
        where: what messages call the file.

    Raises:
        KairosError: no npz, features of another width, or something that a metric needs is not in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            published = [need for need in PUBLISHED if need in needs and names.issuperset(PUBLISHED[need])]
            found = {need: tuple(file[name].astype(float) for name in PUBLISHED[need]) for need in published}
    except FileNotFoundError:
        raise KairosError(f"{where}: {path}: no such file; allowed: an npz of images, or of mu and sigma") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:  # not only npz are loaded
        raise KairosError(f"{where}: {path}: cannot be read as npz ({error})") from None
    if "moments" in found and width is not None and found["moments"][1].shape != (width, width):
        raise KairosError(
            f"{where}: sigma in {path} has shape {found['moments'][1].shape}, allowed: {(width, width)}, the "
            "extractor's features"
        )
    if (missing := needs - found.keys()) and not _IMAGES & names:
        raise KairosError(
            f"{where}: {path} holds {', '.join(sorted(names)) or 'nothing'}; the metrics need "
            f"{', '.join(sorted(missing))} of real images; allowed: an npz with images (or arr_0), or other metrics"
        )
    return found
