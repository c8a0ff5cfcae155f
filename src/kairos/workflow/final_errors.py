"""Errors that another attempt of a job would only repeat, such as an unreadable image: the job is not attempted again.

The first attempt writes a record next to its log. The next run of the workflow deletes these records at its start, so
that it tries the jobs again.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kairos.errors import TemporaryError
from kairos.files import DamagedError, glance, write_json
from kairos.workflow.layout import Layout, find_planned_layout, name_snapshots
from kairos_timesteps.errors import KairosError, NotFiniteError

_SUFFIX = ".error.json"


def list_error_files(results: Path) -> list[Path]:
    """Return the paths of the records of final errors in a folder of results."""
    return sorted(results.glob(f"logs/*{_SUFFIX}"))


def read_final_error(log: str | Path, plan: str) -> str:
    """Return the message of a job's final error; empty: it has none, or only one of another plan."""
    record = glance(Path(log).with_suffix(_SUFFIX))
    return str(record["message"]) if record.get("plan") == plan else ""


@contextmanager
def record_final_error(arguments: argparse.Namespace) -> Iterator[None]:
    """Record the error of a job's block if it is final; if an earlier attempt has recorded one, raise it instead.

    A final error is a `KairosError`, with two exceptions. A `TemporaryError` may pass, and a `DamagedError` may come
    from a file that another machine is still writing. A training run that is not exactly repeatable may diverge by
    chance, so its `NotFiniteError` is not final. In a command that a user calls, nothing is recorded.

    Args:
        arguments: arguments of a stage's command.

    Raises:
        KairosError: an earlier attempt of the job has ended with a final error, whose message is repeated.
    """
    layout = find_planned_layout(arguments.config)
    if layout is None:
        yield
        return
    log = _find_log(layout, arguments)
    if earlier_error := read_final_error(log, layout.plan):
        raise KairosError(earlier_error)
    try:
        yield
    except (TemporaryError, DamagedError):
        raise
    except KairosError as error:
        training = layout.experiment.training
        is_repeatable = training.deterministic and not training.compile
        if is_repeatable or arguments.command != "train" or not isinstance(error, NotFiniteError):
            write_json(log.with_suffix(_SUFFIX), {"plan": layout.plan, "message": str(error)})
        raise


def _find_log(layout: Layout, arguments: argparse.Namespace) -> Path:
    """Return the path of a job's log."""
    values = vars(arguments)
    stage = arguments.command
    if stage == "analyse":
        stage = f"{'analyse' if values.get('step') is None else 'measure'}_{arguments.analysis}"
    number, shard = values.get("segment"), values.get("shard")
    segment = layout.segments[number - 1] if number else None
    template = layout.log_file(stage, segment, is_shard=shard is not None)
    (step,) = name_snapshots((values.get("step") or 0,))
    return Path(template.format(**{**values, "step": step, "shard": shard.name if shard else ""}))
