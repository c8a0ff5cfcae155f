"""``kairos ledger``: the records that Snakemake and DVC keep of the results; used by dvc.yaml and the Makefile."""

import argparse
from pathlib import Path


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    table = actions.add_parser("fingerprints", help="write what each stage's results depend on: fields and code")
    stage = actions.add_parser("run", help="run exactly one stage's jobs of the Snakemake DAG")
    for action in (table, stage):
        file = "experiment file (params.yaml)"
        action.add_argument("--config", type=Path, default=Path("params.yaml"), metavar="F", help=file)
    table.add_argument("--out", type=Path, required=True, metavar="F", help="YAML file to write")
    stage.add_argument("stage", help="which stage")
    stage.add_argument("--method", metavar="M", help="of a training's stages")
    stage.add_argument("--seed", type=int, metavar="N", help="of a training's stages")
    actions.add_parser("record", help="version in DVC what Snakemake has just computed (make record)")
    actions.add_parser("adopt", help="make recorded results this clone's own (make adopt)")


def run(arguments: argparse.Namespace) -> None:
    """Run the action of ``kairos ledger`` that the command line selects."""
    from kairos.workflow.dvc_records import adopt, record, run_stage, write_dependencies

    if arguments.action == "fingerprints":
        write_dependencies(arguments.config, arguments.out)
    elif arguments.action == "run":
        run_stage(arguments.config, arguments.stage, arguments.method, arguments.seed)
    elif arguments.action == "record":
        record()
    else:
        adopt()
