"""``python -m kairos`` and the command ``kairos``."""

from typing import NoReturn

from kairos import process_exit, quick_imports


def run() -> NoReturn:
    """Run the command line of this process, and end the process."""
    process_exit.skip_teardown()
    quick_imports.enable()
    from kairos.cli import main

    process_exit.end_process(main())


if __name__ == "__main__":
    run()
