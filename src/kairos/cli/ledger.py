"""``kairos ledger``: the records that Snakemake and DVC keep of the results; used by dvc.yaml and the Makefile."""

import argparse
from pathlib import Path


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the actions `fingerprints`, `run`, `record` and `adopt` with their arguments; one action is required."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    write_parser = actions.add_parser("fingerprints", help="write the fields and the code that each stage depends on")
    run_parser = actions.add_parser("run", help="run the jobs of one stage of Snakemake's workflow")
    for action in (write_parser, run_parser):
        default = Path("params.yaml")
        action.add_argument("--config", type=Path, default=default, metavar="F", help="experiment file (params.yaml)")
    write_parser.add_argument("--out", type=Path, required=True, metavar="F", help="YAML file to write")
    run_parser.add_argument("stage", help="name of the stage")
    run_parser.add_argument("--method", metavar="M", help="method, for stages of a training run")
    run_parser.add_argument("--seed", type=int, metavar="N", help="seed, for stages of a training run")
    actions.add_parser("record", help="version the latest results of Snakemake in DVC (make record)")
    actions.add_parser("adopt", help="mark recorded results as computed by this clone (make adopt)")


def run(arguments: argparse.Namespace) -> None:
    """Run the action of the command: `fingerprints`, `run`, `record` or `adopt`.

    - `fingerprints` writes the YAML file that DVC compares to find outdated stages.
    - `run` replaces this process by Snakemake, which computes the results of one stage.
    - `record` fills DVC's cache with Snakemake's results and writes ``dvc.lock``.
    - `adopt` pulls the results in ``dvc.lock`` and marks them in Snakemake's metadata as computed here.

    Raises:
        ConfigError: the experiment is not valid, or has no such stage, method or seed.
        KairosError: the action fails, see `workflow.dvc_records`.
    """
    from kairos.workflow.dvc_records import adopt, record, run_stage, write_dependencies

    if arguments.action == "fingerprints":
        write_dependencies(arguments.config, arguments.out)
    elif arguments.action == "run":
        run_stage(arguments.config, arguments.stage, arguments.method, arguments.seed)
    elif arguments.action == "record":
        record()
    else:
        adopt()
