"""The small form of every recipe of the papers through the whole pipeline: `kairos small`, then `snakemake`.

    python benchmarks/recipes.py                                  # all of recipes/
    python benchmarks/recipes.py recipes/speed/table5.yaml ...    # some
    python benchmarks/recipes.py --steps 20 --out /tmp/x.csv ...

As many at once as there are cores, one core each. A row says how long a recipe took beside the others, and what came
out: the first metric of both methods after the last step, and how many published numbers stand beside measured ones.
It shows that the recipe runs; its numbers say nothing of the methods. Images are those of ../shared/data, or $DATA;
texts are encoded by a tiny CLIP made here. Rows of recipes that were not run stay as they were.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # clip_case: a tiny text encoder with the real tokenizer's rules
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
BIN = Path(sys.executable).parent
COLUMNS = ["recipe", "seconds", "result"]
LINES = 15  # of what a failed run has said


def run(recipe: Path, folder: Path, encoder: Path, steps: int) -> tuple[float, str]:
    """Seconds that one took, and what came out; raises SystemExit with what was said where it failed."""
    file = folder / f"{recipe.parent.name}_{recipe.stem}.yaml"
    made = [BIN / "kairos", "small", recipe, file, "--data", DATA, "--text-encoder", encoder, "--steps", str(steps)]
    follows = [BIN / "snakemake", "--cores", "1", "--snakefile", ROOT / "Snakefile", "--directory", folder / file.stem]
    begun, environment = time.monotonic(), os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    for command in (made, [*follows, "--configfile", file]):
        (folder / file.stem).mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-LINES:])
            raise SystemExit(f"{recipe}: {command[0].name} ended with {done.returncode}\n{said}")
    seconds = time.monotonic() - begun
    (results,) = (folder / file.stem / "results").iterdir()
    table = pd.read_csv(results / "summary.csv")
    metric = next(name for name in table.columns if name.startswith("frechet"))
    last = table[table["step"] == table["step"].max()]
    told = ", ".join(f"{row.method} {row[metric]:.3g}" for _, row in last.iterrows())
    published = results / "published.csv"
    beside = pd.read_csv(published)["measured"].notna().sum() if published.is_file() else 0
    return seconds, f"{told} ({metric})" + (f"; {beside} numbers beside published ones" if beside else "")


def main() -> int:
    """Run them, and write a row as each ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="recipes at once")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/recipes.csv")
    arguments = parser.parse_args()
    from clip_case import write_text_encoder

    rows = {}
    if arguments.out.is_file():
        with open(arguments.out, newline="", encoding="utf-8") as file:
            rows = {row["recipe"]: row for row in csv.DictReader(file)}
    recipes = [path.resolve() for path in arguments.recipes] or sorted((ROOT / "recipes").glob("*/*.yaml"))
    failed, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(made)
        encoder = Path(write_text_encoder(folder / "clip"))

        def one(recipe: Path) -> None:
            name = recipe.relative_to(ROOT).as_posix()
            try:
                seconds, result = run(recipe, folder, encoder, arguments.steps)
            except SystemExit as error:
                failed.append(str(error))
                print(error, flush=True)
                return
            print(f"{name}: {seconds:.0f} s, {result}", flush=True)
            rows[name] = {"recipe": name, "seconds": f"{seconds:.0f}", "result": result}
            with open(arguments.out, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows[key] for key in sorted(rows))

        list(pool.map(one, recipes))
    print(f"{len(recipes) - len(failed)} of {len(recipes)} ran, {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
