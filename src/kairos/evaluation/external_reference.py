"""External references: published npz files of real images, or of mean and covariance of their features.

Files of EDM and U-ViT contain `mu` and `sigma`. Files of ADM contain `mu` and `sigma` of the whole data set, `mu_s` and
`sigma_s` of the spatial features, and as `arr_0` 10,000 images for precision and recall.
"""

from pathlib import Path

import numpy as np

from kairos.array_shapes import LayerGaussian
from kairos.evaluation.settings import GAUSSIAN_MEASUREMENTS
from kairos.finite import demand_finite
from kairos_timesteps.errors import KairosError

_IMAGE_ARRAYS = {"images", "arr_0"}  # names of arrays that contain images


def read_moments(path: Path, width: int | None, needs: set[str], where: str) -> dict[str, LayerGaussian]:
    """Read published moments from an npz file, and check that the file contains everything that metrics need.

    Args:
        path: the npz file.
        width: number of features, with which the covariance of ``moments`` is compared, but not the one of ``spatial``;
            None if it is unknown: nothing is compared.
        needs: measurements of real images that the metrics need, see `settings.MEASUREMENTS`.
        where: the experiment's field or the option that sets the file, for messages.

    Returns:
        Mean (d,) and covariance (d, d), float64, by measurement: ``moments`` and ``spatial``, if they are needed and in
        the file. Other measurements are to be taken of the images in the file.

    Raises:
        KairosError: the file is not an npz, has features of another width, or lacks a measurement and images.
        NotFiniteError: a mean or a covariance is not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            moments = {}
            for name, measurement in GAUSSIAN_MEASUREMENTS.items():
                mean_name, covariance_name = measurement.arrays
                file_has_both = mean_name in names and covariance_name in names
                if name in needs and file_has_both:
                    moments[name] = (file[mean_name].astype(float), file[covariance_name].astype(float))
    except FileNotFoundError:
        raise KairosError(f"{where}: {path}: no such file; allowed: an npz of images, or of mu and sigma") from None
    except MemoryError as error:
        raise KairosError(f"{where}: {path}: does not fit into memory ({error})") from None
    except Exception as error:  # numpy, zipfile and zlib raise many kinds for a damaged file
        raise KairosError(f"{where}: {path}: cannot be read as npz ({error})") from None
    for name, (mean, covariance) in moments.items():
        mean_name, covariance_name = GAUSSIAN_MEASUREMENTS[name].arrays
        arrays = {mean_name: mean, covariance_name: covariance}
        demand_finite(arrays, f"{where}: {path}", "download the file again, or pass the images themselves")
    if "moments" in moments and width is not None:
        shape = moments["moments"][1].shape
        if shape != (width, width):
            raise KairosError(
                f"{where}: sigma in {path} has shape {shape}, allowed: {(width, width)}, the extractor's features"
            )
    missing = needs - moments.keys()
    if missing and not _IMAGE_ARRAYS & names:
        raise KairosError(
            f"{where}: {path} contains {', '.join(sorted(names)) or 'nothing'}; the metrics need "
            f"{', '.join(sorted(missing))} of real images; pass an npz with images (or arr_0), or select other metrics"
        )
    return moments
