"""The command line: ``kairos SUBCOMMAND``.

Each subcommand's arguments are declared here or in its module without importing what it runs, so that ``--help`` is
quick. Exit status: 0 done, 1 failed with a message, 2 wrong usage (command line or experiment file).
"""

import argparse
import errno
import gc
import importlib
import os
import sys
from typing import TextIO

# name: (module, one line); the module has add_arguments(parser) and run(arguments)
COMMANDS = {
    "prepare": ("kairos.cli.data", "bring a data set into the pipeline's uniform form"),
    "autoencoder": ("kairos.cli.data", "train or fetch the autoencoder"),
    "text": ("kairos.cli.data", "encode the captions of a data set"),
    "encode": ("kairos.cli.data", "encode a data set into latent moments"),
    "train": ("kairos.cli.train", "train one method with one seed"),
    "import-weights": ("kairos.cli.import_weights", "make a milestone of published weights"),
    "sample": ("kairos.cli.sample", "draw images from milestones"),
    "extractor": ("kairos.cli.evaluate", "train or fetch the feature extractor"),
    "reference": ("kairos.cli.evaluate", "statistics of real images and the reference rows"),
    "evaluate": ("kairos.cli.evaluate", "compare samples with real images"),
    "analyse": ("kairos.cli.analyse", "table and figure of an analysis, or what it measures of a milestone"),
    "report": ("kairos.cli.report", "table, figures and report of an experiment"),
    "compare": ("kairos.cli.compare", "experiments and methods side by side"),
    "track": ("kairos.cli.report", "import an experiment's results into MLflow"),
    "ui": ("kairos.cli.ui", "look at the imported runs in MLflow, from a prepared comparison on"),
    "export": ("kairos.cli.export", "results for TensorBoard, Weights & Biases or the Hugging Face hub"),
    "verify": ("kairos.cli.verify", "check a training's files and print the hash of each part"),
    "schema": ("kairos.cli.check", "JSON schema of experiment files, for editors"),
    "init": ("kairos.cli.new", "lay out a project of one's own: Snakefile, profiles, params.yaml"),
    "new": ("kairos.cli.new", "write an experiment file for a folder of images, with reasons and the time it takes"),
    "small": ("kairos.cli.new", "write the small form of a recipe: some minutes on a processor, real images at hand"),
    "check": ("kairos.cli.check", "check an experiment file and say what it will do"),
    "plan": ("kairos.cli.plan", "what an experiment will cost: jobs, memory, storage, hours of GPUs or CPUs"),
    "fetch": ("kairos.cli.fetch", "bring what jobs without a network need: data set, autoencoder, weights"),
    "status": ("kairos.cli.status", "how far every training is: queued, running, failed, complete"),
    "strategies": ("kairos.cli.strategies", "timestep strategies: list them, show what they train on"),
    "doctor": ("kairos.cli.doctor", "what is installed and usable on this machine"),
    "ledger": ("kairos.cli.ledger", "the workflow's books: fingerprints, record, adopt"),
}

_REASONS = dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where a folder should be")
_REASONS[errno.EISDIR] = "a folder is where a file should be"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from kairos import portable
    from kairos.workflow import fork_server
    from kairos_timesteps.errors import ConfigError, KairosError

    gc.disable()  # imports allocate much and free nothing: 1.5 s of 10 are saved; `resource_usage.end_startup` enables it
    if sys.stdout is None or sys.stderr is None:  # closed, as with >&-
        sys.stdout, sys.stderr = (stream or _nowhere() for stream in (sys.stdout, sys.stderr))
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        from kairos_timesteps.options import instead

        return _fail(f"unknown command {argv[0]!r}{instead(argv[0], COMMANDS)}", 2)
    parser = argparse.ArgumentParser(prog="kairos", description="Train diffusion models on the timesteps that matter.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if argv[:1] == [name]:
            importlib.import_module(module).add_arguments(name, subparser)
    try:
        arguments = parser.parse_args(argv)
        if portable.asked(arguments):
            portable.hold()
        if arguments.command in fork_server.FORKED_STAGES and (status := fork_server.run_on_server(argv)) is not None:
            return status
        importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: 0 after --help, 2 after wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KairosError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:
        with _nowhere() as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted; the last good state is in place", 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        return _fail(f"{where}{reason}; what was complete before is still in place", 1)
    finally:
        gc.enable()
    return 0


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _fail(message: str, status: int) -> int:
    print(f"kairos: {message}", file=sys.stderr, flush=True)
    return status
