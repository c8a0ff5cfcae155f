"""Cut photographs of COCO into patches: a data set on which no strategy of this project was designed or tuned.

    python studies/patches.py COCO

It reads the 51 photographs of coco_patches.txt from the folder COCO, in COCO's layout, and writes
data/coco_patches.parquet.

A patch is a square of 32 pixels, scaled to 8x8; patches do not overlap. The label of a patch is the number of its
photograph, so that the classifier of the setting learns to tell photographs apart.
"""

import argparse
import io
from pathlib import Path

import pandas as pd
from PIL import Image

SIDE, RESOLUTION = 32, 8  # pixels
PHOTOGRAPHS = Path(__file__).with_name("coco_patches.txt")
OUT = Path("data/coco_patches.parquet")


def cut_patches(photograph: Image.Image) -> list[bytes]:
    """Return the patches of a photograph as PNG files of 8x8 pixels, row by row."""
    patches = []
    width, height = photograph.size
    for top in range(0, height - SIDE + 1, SIDE):
        for left in range(0, width - SIDE + 1, SIDE):
            patch = photograph.crop((left, top, left + SIDE, top + SIDE))
            file = io.BytesIO()
            patch.resize((RESOLUTION, RESOLUTION), Image.Resampling.LANCZOS).save(file, "png")
            patches.append(file.getvalue())
    return patches


def main() -> None:
    """Write the patches of all photographs of a folder in COCO's layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("coco", type=Path, help="folder of COCO 2017, with train2017 and val2017")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the parquet file ({OUT})")
    arguments = parser.parse_args()
    paths = [arguments.coco / name for name in PHOTOGRAPHS.read_text(encoding="utf-8").split()]
    if missing := [path for path in paths if not path.exists()]:
        parser.error(f"{len(missing)} of {len(paths)} photographs are missing, such as {missing[0]}")
    rows = []
    for label, path in enumerate(paths):
        with Image.open(path) as photograph:
            rows += [{"image": patch, "label": label} for patch in cut_patches(photograph.convert("RGB"))]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(arguments.out, index=False)
    print(f"{arguments.out}: {len(rows):,} patches of {len(paths)} photographs")


if __name__ == "__main__":
    main()
