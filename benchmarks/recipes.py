"""Run the small form of every recipe of the papers through the whole pipeline, see small_form.py.

    python benchmarks/recipes.py                                  # all of recipes/
    python benchmarks/recipes.py recipes/speed/table5.yaml ...    # some
    python benchmarks/recipes.py --steps 20 --out /tmp/x.csv ...
    python benchmarks/recipes.py --folder try ...                 # keep experiment files and results in folder try

By default one recipe runs on each core. A row contains the duration of a recipe, with others running, and its result.
The result is the first metric of both methods after the last step, and the number of published values that have a
measured one. The rows show that the recipes run; their numbers do not compare the methods. Images are those of the
folder $DATA, see benchmarks/README.md. A tiny CLIP, made here, encodes texts. Rows of recipes that were not run stay in
the file.
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
import yaml
from result_file import write_rows
from small_form import shrink_experiment

from kairos.config import load
from kairos_timesteps.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # clip_case: a tiny text encoder with the real tokenizer's rules
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
BIN = Path(sys.executable).parent
LINES = 15  # of the output of a failed run


def run(recipe: Path, folder: Path, encoder: Path, steps: int) -> tuple[float, str]:
    """Run the small form of a recipe through the pipeline; return its duration in seconds and a text with its result.

    Args:
        recipe: experiment file of the recipe.
        folder: folder that gets the experiment file, and the working directory in a folder of the recipe's name.
        encoder: folder of the text encoder.
        steps: training steps.

    Raises:
        SystemExit: the recipe has no small form, or the run fails; the message contains the end of its output.
    """
    name = f"{recipe.parent.name}_{recipe.stem}"
    file, work = folder / f"{name}.yaml", folder / name
    try:
        values = shrink_experiment(load(recipe), DATA, str(encoder), steps)
    except ConfigError as error:
        raise SystemExit(f"{recipe}: {error}") from None
    file.write_text(f"# the small form of {recipe}\n" + yaml.safe_dump(values, sort_keys=False))
    work.mkdir(exist_ok=True)
    command = [BIN / "snakemake", "--cores", "1", "--snakefile", ROOT / "Snakefile"]
    command += ["--directory", work, "--configfile", file]
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    begun = time.monotonic()
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if process.returncode:
        output = "\n".join((process.stdout + process.stderr).splitlines()[-LINES:])
        raise SystemExit(f"{recipe}: snakemake ended with {process.returncode}\n{output}")
    seconds = time.monotonic() - begun

    # result: first metric of both methods after the last step, and number of compared published values
    results = work / "results" / values["experiment"]
    table = pd.read_csv(results / "summary.csv")
    metric = next(name for name in table.columns if name.startswith("frechet"))
    last_rows = table[table["step"] == table["step"].max()]
    distances = ", ".join(f"{row.method} {row[metric]:.3g}" for _, row in last_rows.iterrows())
    published = results / "published.csv"
    compared = pd.read_csv(published)["measured"].notna().sum() if published.is_file() else 0
    note = f"; {compared} numbers compared with published ones" if compared else ""
    return seconds, f"{distances} ({metric}){note}"


def main() -> int:
    """Run the recipes, and write a row when each ends; return 1 if a recipe fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="recipes at once")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/recipes.csv")
    folder_help = "folder for experiment files and results; default: a temporary one"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=folder_help)
    arguments = parser.parse_args()
    from clip_case import write_text_encoder

    rows = {}
    if arguments.out.is_file():
        with open(arguments.out, newline="", encoding="utf-8") as file:
            rows = {row["recipe"]: row for row in csv.DictReader(file)}
    recipes = [path.resolve() for path in arguments.recipes] or sorted((ROOT / "recipes").glob("*/*.yaml"))
    failed, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary_folder, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = (arguments.folder or Path(temporary_folder)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        encoder = Path(write_text_encoder(folder / "clip"))

        def one(recipe: Path) -> None:
            """Run a recipe; on success, update its row in the file."""
            name = recipe.relative_to(ROOT).as_posix()
            try:
                seconds, result = run(recipe, folder, encoder, arguments.steps)
            except SystemExit as error:
                failed.append(str(error))
                print(error, flush=True)
                return
            print(f"{name}: {seconds:.0f} s, {result}", flush=True)
            rows[name] = {"recipe": name, "seconds": f"{seconds:.0f}", "result": result}
            write_rows(arguments.out, [rows[key] for key in sorted(rows)])

        list(pool.map(one, recipes))
    print(f"{len(recipes) - len(failed)} of {len(recipes)} ran, {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
