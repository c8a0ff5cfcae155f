"""The command line: ``kairos SUBCOMMAND``.

A subcommand's module declares its arguments without importing the code that it runs, so that ``--help`` is quick. Its
function `run` imports that code, after the checks of the arguments: imports of torch take seconds.

Exit status: 0 success, 1 failure with a message, 2 wrong usage (command line or experiment file), 75 a training run
that a signal has stopped early.
"""

import argparse
import errno
import gc
import importlib
import os
import sys
from typing import TextIO

from kairos.stages import STAGES

# name: (module, help in one line); the module has add_arguments(name, parser) and run(arguments)
COMMANDS = {row.name: (row.command, row.description) for row in STAGES if row.command} | {
    "import-weights": ("kairos.cli.import_weights", "import published weights as a snapshot"),
    "compare": ("kairos.cli.compare", "compare experiments and methods in one table"),
    "ui": ("kairos.cli.ui", "open MLflow's pages at a prepared comparison of the imported runs"),
    "export": ("kairos.cli.export", "export results to TensorBoard, Weights & Biases or the Hugging Face hub"),
    "verify": ("kairos.cli.verify", "check results for damage; print the hash of each component of a training run"),
    "schema": ("kairos.cli.check", "print the JSON schema of experiment files, for editors"),
    "init": ("kairos.cli.new", "create a project: Snakefile, profiles, params.yaml"),
    "new": ("kairos.cli.new", "write an experiment file for a folder of images, with reasons and predicted time"),
    "check": ("kairos.cli.check", "check an experiment file and print its jobs, methods and warnings"),
    "plan": ("kairos.cli.plan", "estimate the cost of an experiment: jobs, memory, storage, GPU-hours or CPU-hours"),
    "fetch": ("kairos.cli.fetch", "download data set, autoencoder and weights for jobs without internet access"),
    "status": ("kairos.cli.status", "print the state of every training run: queued, running, failed, complete"),
    "strategies": ("kairos.cli.strategies", "list timestep strategies, or show density and weights of one"),
    "doctor": ("kairos.cli.doctor", "check software, devices and cluster of this machine"),
    "accept": ("kairos.cli.accept", "keep results whose code alone has changed"),
    "discard": ("kairos.cli.accept", "delete records and states, so that results are computed anew"),
    "record": ("kairos.cli.record", "write a hash of every result to a file for git, for kairos verify --against"),
}

# messages for errors of the operating system whose own messages do not help
_OS_ERROR_MESSAGES = {
    errno.EEXIST: "a file is where a folder should be",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.EISDIR: "a folder is where a file should be",
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status; an error becomes a message on standard error.

    The status is 2 for wrong usage and a ConfigError. It is 1 for any other KairosError, for an OSError, for a closed
    pipe and after Ctrl-C; a closed pipe has no message. A SystemExit with a number has this status, such as 75 for a
    training run that stopped early. Other exceptions are programming errors and are raised. The garbage collector is
    off until the subcommand calls `resource_usage.end_startup`, or else until it returns. Output to a standard stream
    that is closed is discarded.

    Args:
        argv: arguments without the name of the program; None: the process's arguments.
    """
    from kairos_timesteps.errors import ConfigError, KairosError

    # imports allocate many objects that stay in use, and collections during imports take 1.5 s of 10 s;
    # `resource_usage.end_startup` enables the collector again
    gc.disable()
    if sys.stdout is None:  # closed, as with >&-
        sys.stdout = _open_null()
    if sys.stderr is None:
        sys.stderr = _open_null()
    try:
        return _run_subcommand(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after wrong usage; `StoppedEarly`: 75
        return stop.code if isinstance(stop.code, int) else 1
    except KairosError as error:
        return _fail(str(error), status=2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader of a pipe has ended, as `head` does
        with _open_null() as null:  # Python flushes stdout again at its end
            os.dup2(null.fileno(), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted; complete results and checkpoints are kept", status=1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = _OS_ERROR_MESSAGES.get(error.errno or 0, error.strerror or str(error))
        return _fail(f"{where}{reason}; results that were complete are kept", status=1)
    finally:
        gc.enable()


def _run_subcommand(argv: list[str]) -> int:
    """Parse a command line, run its subcommand, and return the exit status.

    If the experiment is portable, environment variables that limit CPU instructions are set first. Stages in
    `FORKED_STAGES` then run in a fork of the controller's fork server, if there is one that accepts them, and the exit
    status of the fork is returned. All other subcommands run in this process, and return 0 or raise their errors. An
    unknown command prints a message, with a similar command if there is one, and returns 2.

    Raises:
        SystemExit: argparse has printed the help or an error, or a training run stopped early.
    """
    from kairos import portable
    from kairos.stages import STAGES
    from kairos.workflow import fork_server

    command = argv[0] if argv else None  # the first argument may be an option such as --help
    if command is not None and not command.startswith("-") and command not in COMMANDS:
        from kairos_timesteps.options import allowed_names_hint

        return _fail(f"unknown command {command!r}{allowed_names_hint(command, COMMANDS)}", status=2)
    arguments = _build_parser(command).parse_args(argv)  # raises SystemExit after --help, and without a command
    if portable.is_requested(arguments):
        portable.set_variables()  # before numpy and torch are imported, which read them
    if arguments.command in fork_server.FORKED_STAGES:
        status = fork_server.run_on_server(argv)
        if status is not None:  # else there is no server that accepts the stage: run it here
            return status
    module = importlib.import_module(COMMANDS[arguments.command][0])
    if any(row.name == arguments.command for row in STAGES):
        from kairos.workflow.final_errors import record_final_error

        with record_final_error(arguments):
            module.run(arguments)
    else:
        module.run(arguments)
    sys.stdout.flush()  # a closed pipe raises its error here, where `main` handles it
    return 0


def _build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line, with all subcommands, of which only `command` has arguments.

    The modules of other subcommands are not imported, which is quick. If `command` is None or no subcommand, none has
    arguments.
    """
    parser = argparse.ArgumentParser(prog="kairos", description="Train diffusion models on the timesteps that matter.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == command:
            importlib.import_module(module).add_arguments(name, subparser)
    return parser


def _open_null() -> TextIO:
    """Return a text file that discards what is written to it."""
    return open(os.devnull, "w", encoding="utf-8")


def _fail(message: str, status: int) -> int:
    """Print an error message with prefix ``kairos:`` to standard error, and return `status`, the exit status."""
    print(f"kairos: {message}", file=sys.stderr, flush=True)
    return status
