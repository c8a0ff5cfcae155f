"""``python -m kairos`` and the command ``kairos``."""

from typing import NoReturn

from kairos import process_exit, quick_imports


def run() -> NoReturn:
    """Run the command line of this process, and end the process with the exit status of the command.

    The process ends without the interpreter's teardown, see `process_exit`. Quick imports of diffusers are enabled.
    """
    # before the import, which may register functions for the exit
    process_exit.skip_teardown()
    quick_imports.enable()
    from kairos.cli import main

    process_exit.end_process(main())


if __name__ == "__main__":
    run()
