"""Compare the distance of the studies with FID, on samples of the same networks (studies/fid.md).

    python benchmarks/fid.py              # moments of the real images, in results/fid
    python studies/fid.py run             # train, sample and measure both distances; run again to resume
    python studies/fid.py table           # values and rank correlations

`run` appends each finished training run to studies/results/fid.csv.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
from judge import write_table
from run import run_experiment
from scipy.stats import spearmanr

from kairos.config import load
from kairos.files import read_record
from kairos.snapshots import step_name
from kairos.workflow.layout import Layout

CONFIG = Path(__file__).with_name("fid.yaml")
TABLE = Path(__file__).parent / "results" / "fid.csv"
REAL = Path("results/fid/real.npz")  # moments of all training images, of benchmarks/fid.py
MEASURES = {"fid": "fid", "distance": "frechet_classifier64"}  # column of the table: metric of the evaluation


def read_table() -> pd.DataFrame:
    """Return the finished training runs, one row each; empty without any."""
    return pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=["method", "seed", *MEASURES])


def run(cores: int) -> int:
    """Train, sample and evaluate the missing runs, seed by seed. Returns 0, or the first exit status that is not."""
    layout = Layout(load(CONFIG), CONFIG)
    shared = ["extractor", "reference", "encode"]
    if status := run_experiment(CONFIG, str(cores), shared):
        return status
    for seed in layout.experiment.seeds:
        table = read_table()
        finished = set(table.loc[table["seed"] == seed, "method"])
        folders = {name: Path(layout.training_folder(name, seed)) for name in layout.methods if name not in finished}
        if not folders:
            continue
        if status := run_experiment(CONFIG, str(cores), [f"{folder}/training.json" for folder in folders.values()]):
            return status
        with ThreadPoolExecutor(cores) as executor:
            distances = executor.map(lambda folder: measure(folder, layout), folders.values())
            for name, values in zip(folders, distances):
                row: dict[str, Any] = {"method": name, "seed": seed, **values}
                write_table(TABLE, [read_table(), pd.DataFrame([row])], ["method", "seed"])
    return 0


def measure(folder: Path, layout: Layout) -> dict[str, float]:
    """Return FID and the studies' distance of the same samples of a training run's last snapshot.

    Raises:
        subprocess.CalledProcessError: a command fails.
    """
    snapshot = folder / "snapshots" / step_name(layout.experiment.milestones[-1])
    samples = folder / "samples.npz"
    evaluation = layout.experiment.evaluation
    kairos("sample", "--snapshot", snapshot, "--out", samples, "--num", evaluation.num_samples)
    reference = ("--reference", Path(layout.results, "reference"), "--out", folder / "distance.json")
    kairos("evaluate", "--samples", samples, *reference)
    kairos("evaluate", "--samples", samples, "--reference", REAL, "--metrics", "fid", "--out", folder / "fid.json")
    samples.unlink()
    return {name: read_record(folder / f"{name}.json")["metrics"][metric] for name, metric in MEASURES.items()}


def kairos(*arguments: object) -> None:
    """Run a command of kairos with one thread."""
    command = [sys.executable, "-m", "kairos", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> int:
    """Run the study, or print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.cores)
    table = read_table()
    values = table.pivot(index="method", columns="seed", values=list(MEASURES))
    print(values.round(2).to_string())
    for seed, rows in table.groupby("seed"):
        print(
            f"seed {seed}: rank correlation over {len(rows)} methods {spearmanr(rows['fid'], rows['distance'])[0]:.2f}"
        )
    means = table.groupby("method")[list(MEASURES)].mean()
    print(f"means over seeds: rank correlation {spearmanr(means['fid'], means['distance'])[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
