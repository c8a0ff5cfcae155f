"""The study's trainings, each round through the pipeline: settings x methods x seeds; goes on where it was stopped.

    python studies/run.py first                      # twelve methods, two seeds, every setting
    python studies/run.py second --methods uniform min_snr ...
    python studies/run.py third --methods coarse_to_fine
    python studies/run.py rates --methods uniform min_snr ...
    python studies/run.py first --settings digits --cores 1

A round is an experiment per setting (and learning rate), written to results/study_<round>_<setting>/ as the file that
`kairos check` and `snakemake --configfile` take. Rounds have seeds of their own, so that what is chosen in the first is
judged on trainings that the choice has not seen.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
SETTINGS = [path.stem for path in sorted((HERE / "settings").glob("*.yaml"))]
LATER = ("auto", "coarse_to_fine")  # than the first round, which they are no part of unless named
ROUNDS = {  # seeds, and factors of the learning rate
    "first": (range(2), [1.0]),
    "second": (range(10, 20), [1.0]),
    "third": (range(10, 20), [1.0]),  # of methods that the second did not have, paired with its seeds
    "rates": (range(10, 12), [0.5, 2.0]),
}


def experiments(which: str, settings: list[str], methods: list[str] | None) -> list[Path]:
    """Write a round's experiment files; they differ from the setting in methods, seeds and learning rate alone."""
    known = yaml.safe_load((HERE / "methods.yaml").read_text(encoding="utf-8"))
    if missing := sorted({*(methods or ())} - {*known}):
        raise SystemExit(f"--methods: got {', '.join(missing)}, allowed: {', '.join(known)}")
    chosen = {name: known[name] for name in methods or [name for name in known if name not in LATER]}
    seeds, factors = ROUNDS[which]
    paths = []
    for setting in settings:
        for factor in factors:
            plain = yaml.safe_load((HERE / "settings" / f"{setting}.yaml").read_text(encoding="utf-8"))
            name = f"study_{which}_{setting}" + ("" if factor == 1 else f"_lr{factor:g}")
            plain["training"]["optimizer"]["lr"] *= factor
            plain |= {"experiment": name, "seeds": [*seeds], "methods": chosen, "tracking": {"enabled": False}}
            path = Path("results") / name / "experiment.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
            paths.append(path)
    return paths


def main() -> int:
    """Run a round, one experiment after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=ROUNDS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--methods", nargs="+", help="of studies/methods.yaml; default: all of the first round")
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    for path in experiments(arguments.round, arguments.settings, arguments.methods):
        command = ["snakemake", "--cores", arguments.cores, "--keep-going", "--configfile", str(path)]
        if status := subprocess.run(command).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
