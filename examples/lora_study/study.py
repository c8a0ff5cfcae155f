"""Fine-tune with every strategy in rounds, and write a row per finished run; repeat the command to resume.

    python examples/lora_study/study.py base                    # without fine-tuning, and real images
    python examples/lora_study/study.py tune                    # three learning rates, two seeds
    python examples/lora_study/study.py judge                   # the selected rates, ten other seeds
    python examples/lora_study/study.py judge --tasks style --images 16 --processes 2

Rows are appended to base.csv, tune.csv and judge.csv in examples/lora_study/results. Finished rows are skipped, so a
round continues on another machine from the committed file. Every process uses one thread.
"""

import argparse
import csv
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from finetune import STRATEGIES, finetune
from measure import MEASURES, measure, measure_real

HERE = Path(__file__).parent
STEPS, BATCH = 250, 8
RATES = (5e-4, 2e-3, 8e-3)
IMAGE_COUNTS = (16, 64)
SEEDS = {"base": range(10, 13), "tune": range(2), "judge": range(10, 20)}
REAL_IMAGES = 252
SETTING = "fashion_mnist:FashionMnist"


class Run(NamedTuple):
    """Fine-tuning run; the fields are the first columns of its row.

    In round ``base`` strategy ``base`` is the network without fine-tuning, and ``real`` are real images.
    """

    task: str
    images: int
    strategy: str
    rate: float
    steps: int
    seed: int


# columns of the tables: README.md explains the measures; the last two columns are seconds of CPU time
COLUMNS = (*Run._fields, *MEASURES, "train_seconds", "measure_seconds")


@cache
def load_setting(path: str) -> Any:
    """Return an object of the class at ``module:class``; the module is imported from this folder or the path."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def execute(job: tuple[Run, str]) -> dict[str, Any]:
    """Fine-tune a network, measure it, and return the row of the run."""
    run, path = job
    torch.set_num_threads(1)
    setting = load_setting(path)
    data = setting.training_data(run.task, run.images, run.seed)
    if run.strategy == "real":
        return {**run._asdict(), **measure_real(setting, run.task, REAL_IMAGES, run.seed)}
    if run.strategy == "base":
        return {**run._asdict(), **measure(setting, setting.load_network(), run.task, data, run.seed)}
    start = time.process_time()
    network = finetune(setting, STRATEGIES[run.strategy], data, run.rate, run.steps, BATCH, run.seed)
    trained = time.process_time()
    measures = measure(setting, network, run.task, data, run.seed)
    seconds = {"train_seconds": trained - start, "measure_seconds": time.process_time() - trained}
    return {**run._asdict(), **measures, **seconds}


def read_rows(path: Path) -> pd.DataFrame:
    """Return the finished rows of a file; a last line without an end, from a run that was killed, is dropped."""
    if not path.exists():
        return pd.DataFrame(columns=list(COLUMNS), dtype=float)
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    return pd.read_csv(path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row in one write, after the names of the columns in a new file."""
    cells = [row.get(column, "") for column in COLUMNS]
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
        file.flush()
        os.fsync(file.fileno())


def select_rates(rows: pd.DataFrame) -> dict[tuple[str, int, str], float]:
    """Return the rate with the lowest distance, geometric mean over tuning seeds, by task, images and strategy.

    Only strategies whose runs of all rates and tuning seeds are finished are included.
    """
    rows = rows.assign(log_distance=np.log(rows["distance"]))
    selected = {}
    for (task, images, strategy), group in rows.groupby(["task", "images", "strategy"]):
        if len(group) == len(RATES) * len(SEEDS["tune"]):
            means = group.groupby("rate")["log_distance"].mean()
            selected[str(task), int(images), str(strategy)] = float(means.idxmin())
    return selected


def list_runs(round_name: str, arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of a round, cell by cell of task and number of images, and seed by seed.

    Raises:
        SystemExit: the tuning of a strategy is not finished.
    """
    rates = {} if round_name == "tune" else select_rates(read_rows(arguments.out / "tune.csv"))
    cells = product(arguments.images, arguments.tasks)
    if round_name == "base":
        for (images, task), seed, strategy in product(cells, SEEDS[round_name], ("base", "real")):
            yield Run(task, images, strategy, 0.0, 0, seed)
        return
    for (images, task), seed, strategy in product(cells, SEEDS[round_name], arguments.strategies):
        if round_name == "judge" and (task, images, strategy) not in rates:
            raise SystemExit(f"{strategy}, {task}, {images} images: no rate is selected; finish `study.py tune` first")
        for rate in RATES if round_name == "tune" else [rates[task, images, strategy]]:
            yield Run(task, images, strategy, rate, arguments.steps, seed)


def main(argv: list[str] | None = None) -> None:
    """Compute the unfinished runs of a round, and print rate and remaining time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=SEEDS, help="round of the study")
    parser.add_argument("--setting", default=SETTING, metavar="MODULE:CLASS", help="model, images and features")
    parser.add_argument("--tasks", nargs="+", help="tasks of the setting; default: all")
    parser.add_argument("--images", nargs="+", type=int, default=IMAGE_COUNTS, help="numbers of fine-tuning images")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a fine-tuning run")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the tables")
    arguments = parser.parse_args(argv)
    arguments.tasks = arguments.tasks or load_setting(arguments.setting).tasks
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.round}.csv"
    finished = {Run(*row) for row in read_rows(path)[list(Run._fields)].itertuples(index=False)}
    jobs = [(run, arguments.setting) for run in list_runs(arguments.round, arguments) if run not in finished]
    print(f"{len(finished)} rows in {path}, {len(jobs)} runs to do", flush=True)
    start = time.monotonic()
    with ExitStack() as stack:
        if arguments.processes == 1:
            rows = map(execute, jobs)
        else:
            pool = stack.enter_context(get_context("spawn").Pool(arguments.processes))
            rows = pool.imap_unordered(execute, jobs)
        for count, row in enumerate(rows, 1):
            append_row(path, row)
            rate = count / (time.monotonic() - start)
            left = (len(jobs) - count) / rate / 60
            print(f"{count}/{len(jobs)} runs, {60 * rate:.1f} per minute, {left:.0f} minutes left", flush=True)


if __name__ == "__main__":
    main()
