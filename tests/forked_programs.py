"""Programs as forks of one process that has imported Snakemake and DVC, since imports take most of a short command.

The process contains neither torch nor a module of kairos: each fork imports kairos from its PYTHONPATH, since tests
edit that code.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

PROGRAMS = ("snakemake", "kairos", "python")  # python only with -c CODE
PACKAGES = ("kairos", "kairos_timesteps", "snakemake_executor_plugin_kairos")
_server: "subprocess.Popen[str] | None" = None


def run(command: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of one of `PROGRAMS` in a folder; returns its exit status and its output, as `subprocess.run`."""
    global _server
    if _server is None:
        _server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_server.communicate)  # closes its standard input, which ends it
    with tempfile.TemporaryDirectory(prefix="forked-") as output:
        logs = [Path(output, name) for name in ("stdout", "stderr")]
        order = {"command": command, "folder": str(folder), "environment": environment, "logs": [*map(str, logs)]}
        print(json.dumps(order), file=_server.stdin, flush=True)
        status = int(_server.stdout.readline())
        return subprocess.CompletedProcess(command, status, *(log.read_text() for log in logs))


def run_command(command: list[str]) -> object:
    """Run a command as its program does; returns the status that the program passes to `sys.exit`."""
    program, *arguments = command
    sys.argv = command
    if program == "python":
        option, code, *more = arguments
        assert option == "-c"
        sys.argv = ["-c", *more]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return 0
    if program == "kairos":
        from kairos.cli import main as kairos

        return kairos(arguments)
    from snakemake.cli import main as snakemake

    return snakemake(arguments)


def run_in_fork(order: dict) -> None:
    """Give this process, a fork, the folder, environment and streams of a command; run it, and end the process."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for log, stream in zip(order["logs"], (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status: object = 1
    try:
        status = run_command(order["command"])
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status or 0))  # type: ignore[call-overload]


def serve() -> None:
    """Read orders from standard input until it is closed; answer each with the exit status of its fork."""
    del sys.path[0]  # the folder of this file, which is not in the path of a command that a user starts
    # imports of the programs, and smart_open, which Snakemake imports when it first reads a file
    import dvc.repo  # noqa: F401
    import smart_open  # noqa: F401
    import snakemake.cli  # noqa: F401

    import kairos.cli
    import kairos.workflow.controller
    import kairos.workflow.layout
    import kairos.workflow.rules  # noqa: F401

    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            run_in_fork(order)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
