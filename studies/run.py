"""Run the training runs of a round of the study through the pipeline: settings x methods x seeds; resumes if repeated.

    python studies/run.py first                      # twelve methods, two seeds, every setting
    python studies/run.py second --methods uniform min_snr ...
    python studies/run.py third --methods coarse_to_fine
    python studies/run.py rates --methods uniform min_snr ...
    python studies/run.py first --settings digits --cores 1

A round has one experiment per setting (and learning rate). The experiment file is written to
results/study_<round>_<setting>/, for `kairos check` and `snakemake --configfile`. Every round has other seeds, so that
methods selected in the first round are tested on new training runs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
SETTINGS = [path.stem for path in sorted((HERE / "settings").glob("*.yaml"))]
LATER = ("auto", "coarse_to_fine")  # methods of later rounds: not in the first one unless selected
ROUNDS = {  # seeds, and factors of the learning rate
    "first": (range(2), [1.0]),
    "second": (range(10, 20), [1.0]),
    "third": (range(10, 20), [1.0]),  # methods that the second round lacks, with its seeds
    "rates": (range(10, 12), [0.5, 2.0]),
}


def write_experiments(which: str, settings: list[str], methods: list[str] | None) -> list[Path]:
    """Write an experiment file per setting and learning rate of a round, and return the files.

    A file differs from its setting only in name, methods, seeds, learning rate and disabled tracking. An existing file
    is overwritten.

    Args:
        which: name of the round.
        settings: names of the settings.
        methods: names of the methods; None: all methods of the first round.

    Raises:
        SystemExit: a method is not in methods.yaml.
    """
    methods_by_name = yaml.safe_load((HERE / "methods.yaml").read_text(encoding="utf-8"))
    missing = sorted({*(methods or ())} - {*methods_by_name})
    if missing:
        raise SystemExit(f"--methods: got {', '.join(missing)}, allowed: {', '.join(methods_by_name)}")
    names = methods or [name for name in methods_by_name if name not in LATER]
    selected = {name: methods_by_name[name] for name in names}
    seeds, factors = ROUNDS[which]
    paths = []
    for setting in settings:
        for factor in factors:
            plain = yaml.safe_load((HERE / "settings" / f"{setting}.yaml").read_text(encoding="utf-8"))
            experiment = f"study_{which}_{setting}" + ("" if factor == 1 else f"_lr{factor:g}")
            plain["training"]["optimizer"]["lr"] *= factor
            plain |= {"experiment": experiment, "seeds": [*seeds], "methods": selected, "tracking": {"enabled": False}}
            path = Path("results") / experiment / "experiment.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
            paths.append(path)
    return paths


def main() -> int:
    """Run a round, one experiment after the other; return 0, or the status of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=ROUNDS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--methods", nargs="+", help="of studies/methods.yaml; default: all of the first round")
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    for path in write_experiments(arguments.round, arguments.settings, arguments.methods):
        command = ["snakemake", "--cores", arguments.cores, "--keep-going", "--configfile", str(path)]
        if status := subprocess.run(command).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
