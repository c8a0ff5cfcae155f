"""Cut photographs of COCO into patches: a data set on which no strategy of this project was designed or tuned.

    python studies/patches.py COCO

It reads COCO/train2017/*.jpg and COCO/val2017/*.jpg, and writes data/coco_patches.parquet.

A patch is a square of 64 pixels, scaled to 8x8; neighbours overlap by half. The label of a patch is the number of its
photograph, so that the classifier of the setting learns to tell photographs apart.
"""

import argparse
import io
from pathlib import Path

import pandas as pd
from PIL import Image

SIDE, STRIDE, RESOLUTION = 64, 32, 8  # pixels
OUT = Path("data/coco_patches.parquet")


def cut_patches(photograph: Image.Image) -> list[bytes]:
    """Return the patches of a photograph as PNG files of 8x8 pixels, row by row."""
    patches = []
    width, height = photograph.size
    for top in range(0, height - SIDE + 1, STRIDE):
        for left in range(0, width - SIDE + 1, STRIDE):
            patch = photograph.crop((left, top, left + SIDE, top + SIDE))
            file = io.BytesIO()
            patch.resize((RESOLUTION, RESOLUTION), Image.Resampling.LANCZOS).save(file, "png")
            patches.append(file.getvalue())
    return patches


def main() -> None:
    """Write the patches of all photographs of a folder in COCO's layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("coco", type=Path, help="folder with train2017 and val2017")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the parquet file ({OUT})")
    arguments = parser.parse_args()
    paths = sorted(arguments.coco.glob("*2017/*.jpg"))
    if not paths:
        parser.error(f"{arguments.coco}: no train2017/*.jpg or val2017/*.jpg")
    rows = []
    for label, path in enumerate(paths):
        with Image.open(path) as photograph:
            rows += [{"image": patch, "label": label} for patch in cut_patches(photograph.convert("RGB"))]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(arguments.out, index=False)
    print(f"{arguments.out}: {len(rows):,} patches of {len(paths)} photographs")


if __name__ == "__main__":
    main()
