"""``kairos accept`` and ``kairos discard``: keep results of other code, or delete results to compute them anew."""

import argparse
from pathlib import Path

from kairos.cli.common import demand_option


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos accept` or `kairos discard`."""
    parser.add_argument("experiment", type=Path, metavar="FILE", help="experiment file, e.g. params.yaml")
    parser.add_argument(
        "--stage", metavar="S", help="results of this stage alone: prepare, train, sample, ..., analyse_NAME"
    )
    parser.add_argument("--method", metavar="M", help="results of the training runs of this method alone")
    if name == "discard":
        help = "delete only states of training that no run resumes, of earlier settings or code"
        parser.add_argument("--unused-states", action="store_true", help=help)


def run(arguments: argparse.Namespace) -> None:
    """Change the records of an experiment's results, and print the number of changed or deleted files.

    - `accept`: results whose settings and inputs are those of the experiment, and whose code alone differs, count as
      computed by the present code. Later reports mark them as computed by other code.
    - `discard`: records and states are deleted, and the next run of the workflow computes the results anew. With
      ``--unused-states``, states of earlier settings or code are deleted, and no result.

    Raises:
        ConfigError: the experiment file is not valid, or lacks the stage or the method; or ``--unused-states`` is
            combined with ``--stage``. For `accept`, settings or inputs of a result differ; no record is changed then.
        KairosError: a run of the workflow computes these results.
    """
    from kairos.config import load
    from kairos.workflow.records import accept, discard, discard_unused_states

    experiment, _ = load(arguments.experiment).resolve()
    results = Path("results") / experiment.experiment
    if arguments.command == "accept":
        paths, past = accept(experiment, results, arguments.stage, arguments.method), "accepted"
    elif arguments.unused_states:
        demand_option(arguments.stage is None, "stage", arguments.stage, "none with --unused-states")
        paths, past = discard_unused_states(experiment, results, arguments.method), "deleted"
    else:
        paths, past = discard(experiment, results, arguments.stage, arguments.method), "deleted"
    for path in paths:
        print(path)
    print(f"{results}: {len(paths)} {past}")
