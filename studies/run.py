"""Run the training runs of a round of the study through the pipeline: settings x methods x seeds; resumes if repeated.

    python studies/run.py first                      # twelve methods, two seeds, every setting
    python studies/run.py second --methods uniform min_snr ...
    python studies/run.py third --methods coarse_to_fine
    python studies/run.py rates --methods uniform min_snr ...
    python studies/run.py first --settings digits --cores 1

A round has one experiment per setting (and learning rate). The experiment file is written to
results/study_<round>_<setting>/, for `kairos check` and `snakemake --configfile`. The rounds `second`, `third` and
`rates` use other seeds than `first`, so that methods selected in the first round are tested on new training runs.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SETTINGS = ["cifar10", "digits", "fashion_mnist"]
LATER = ("auto", "coarse_to_fine")  # methods of later rounds: not in the first one unless selected
ROUNDS = {  # seeds, and factors of the learning rate
    "first": (range(2), [1.0]),
    "second": (range(10, 20), [1.0]),
    "third": (range(10, 20), [1.0]),  # methods that the second round lacks, with its seeds
    "rates": (range(10, 12), [0.5, 2.0]),
}


def write_experiment(name: str, setting: str, methods: dict[str, Any], seeds: Iterable[int], factor: float = 1) -> Path:
    """Write the experiment file of a setting with these methods and seeds; `factor` scales its learning rate."""
    plain = yaml.safe_load((HERE / "settings" / f"{setting}.yaml").read_text(encoding="utf-8"))
    plain["training"]["optimizer"]["lr"] *= factor
    plain |= {"experiment": name, "seeds": [*seeds], "methods": methods, "tracking": {"enabled": False}}
    path = Path("results") / name / "experiment.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path


def run_experiment(path: Path, cores: str, targets: Sequence[str] = ()) -> int:
    """Run an experiment through the pipeline, or some targets; a repeated call resumes it. Returns the exit status."""
    snakemake = [sys.executable, "-m", "snakemake"]
    options = ["--cores", cores, "--keep-going", "--configfile", str(path)]
    return subprocess.run([*snakemake, *options, "--", *targets]).returncode


def write_round(which: str, settings: list[str], methods: list[str] | None) -> list[Path]:
    """Write a round's experiment files, which differ from the setting only in methods, seeds and learning rate."""
    methods_by_name = yaml.safe_load((HERE / "methods.yaml").read_text(encoding="utf-8"))
    if missing := sorted({*(methods or ())} - {*methods_by_name}):
        raise SystemExit(f"--methods: got {', '.join(missing)}, allowed: {', '.join(methods_by_name)}")
    names = methods or [name for name in methods_by_name if name not in LATER]
    selected = {name: methods_by_name[name] for name in names}
    seeds, factors = ROUNDS[which]
    paths = []
    for setting in settings:
        for factor in factors:
            name = f"study_{which}_{setting}" + ("" if factor == 1 else f"_lr{factor:g}")
            paths.append(write_experiment(name, setting, selected, seeds, factor))
    return paths


def main() -> int:
    """Run a round, one experiment after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=ROUNDS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--methods", nargs="+", help="of studies/methods.yaml; default: all of the first round")
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    for path in write_round(arguments.round, arguments.settings, arguments.methods):
        if status := run_experiment(path, arguments.cores):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
