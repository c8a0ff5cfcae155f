"""DVC's record of the results: write it, adopt it with Snakemake's metadata, and compare the files on disk with it.

``dvc.yaml`` contains the stages of the experiment in ``params.yaml``, ``dvc.lock`` the hashes of their results.
Snakemake keeps metadata of its own. The commands ``kairos ledger`` and ``kairos verify --against`` call this module.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from kairos.config import load
from kairos.config.plugins import source_files
from kairos.files import read_json, write_json, write_text
from kairos.progress import log
from kairos.workflow.layout import TRAINING_STAGES, Layout, create_layout
from kairos_timesteps.errors import ConfigError, KairosError, demand, rejection

RECORDED = "params.yaml"  # experiment file whose stages dvc.yaml contains and whose results `record` and `adopt` handle
_PYTHON = (sys.executable, "-m")  # start of a command that runs a tool of this Python environment
_STAGES_FILE = Path("dvc.yaml")  # all stages except the first
_LOCK_FILE = Path("dvc.lock")  # hashes of the results of the stages in dvc.yaml
# file of the first stage, which writes the table that the stages in dvc.yaml depend on. It is a separate file, because
# its lock file changes with every byte of the code.
_FIRST_STAGE_FILE = Path("workflow/dvc.yaml")
_NO_TELEMETRY = {"DVC_NO_ANALYTICS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}
_NAMES_WITH_CLOCK_TIMES = (
    "report.html",
    "summary.csv",
    "figures",
    "timing",
    "timing.jsonl",
)  # names of outputs or folders
# fields of a machine's record (`portable.machine`) in which two runs are compared
_MACHINE_FACTS = ("processor", "instruction_set", "torch", "numpy", "libc", "python")
_MOST_LINES = 20  # of changed files in a message
_SET_REMOTE = (
    "Set the location of the recorded data, for this clone alone:\n"
    "  dvc remote add --local --default store PATH_OR_URL\n"
    "and run `make adopt` again. Without the recorded data, `make demo` computes the same results."
)


# ---------------------------------------------------------------------------------------------- dependencies for DVC


def write_dependencies(config: Path, out: Path) -> None:
    """Write the fields and the hash of the code of every stage as YAML, which DVC reads as ``params``.

    The stages of training runs have an entry for each method. The file keeps its modification time if nothing changed.

    If `config` is the path ``params.yaml`` and dvc.yaml exists, the methods are first written into dvc.yaml and the
    plugin files into workflow/dvc.yaml. If dvc.yaml exists, its stages are then checked, for every experiment file.
    A frozen copy of the experiment is also written, see `create_layout`.

    Args:
        config: the experiment file.
        out: the YAML file.

    Raises:
        ConfigError: the experiment is not valid, or dvc.yaml lacks a stage that the experiment has.
        KairosError: this call has changed dvc.yaml or workflow/dvc.yaml. The YAML file `out` is not written. The same
            call continues after a commit.
    """
    layout = create_layout(load(config))
    if _STAGES_FILE.is_file():
        if str(config) == RECORDED:
            # both raise an error after a change: `dvc repro`, whose first stage calls this function, has read the file
            # before
            _update_methods(layout.methods)
            _update_plugin_files(layout.experiment.plugins)
        _check_stages(layout, config)
    table = _build_dependency_table(layout)
    without_shared_objects = json.loads(json.dumps(table))  # else YAML writes anchors
    text = yaml.safe_dump(without_shared_objects, sort_keys=True)
    if not out.exists() or out.read_text(encoding="utf-8") != text:
        write_text(out, text)


def _check_stages(layout: Layout, config: Path) -> None:
    """Raise ConfigError if dvc.yaml lacks a stage that all training runs of an experiment share.

    Stages of training runs and ``report`` are not checked. `config` is the experiment file, for the message.
    """
    stages = yaml.safe_load(_STAGES_FILE.read_text(encoding="utf-8"))["stages"]
    missing = set(layout.shared_stages) - set(stages)
    if missing:
        advice = "add it in the manner of autoencoder, and its manifest to the deps of encode"
        raise ConfigError(f"{config}: {_STAGES_FILE} has no stage {', '.join(sorted(missing))}; {advice}")


def _build_dependency_table(layout: Layout) -> dict[str, Any]:
    """Return fields and hash of the code of every stage, as nested dictionaries; analyses and MLflow have no stage.

    A shared stage, or ``report``, has the fields and ``code`` at its name. A stage of training runs has an entry for
    each method, whose key ``fields`` contains the fields, ``code`` and the milestones. Dots in the name of a method
    separate levels: ``uniform.lr0.1`` has its entry at ``uniform``, ``lr0``, ``1``.
    """
    table: dict[str, Any] = {}
    for stage in (*layout.shared_stages, "report"):
        table[stage] = layout.dependencies(stage)
    for stage, method in product(TRAINING_STAGES, layout.methods):
        # create the levels of the entry, and descend to it; DVC splits keys at dots
        entry = table.setdefault(stage, {})
        for level in method.split("."):
            entry = entry.setdefault(level, {})
        fields = layout.dependencies(stage, method)
        entry["fields"] = {**fields, "milestones": list(layout.experiment.milestones)}
    return table


def _update_methods(methods: list[str]) -> None:
    """Set the `method:` lines of dvc.yaml: `${methods}`, or the names if params.yaml inherits them or has a grid.

    A file without such lines, or with these values already, is left as it is, without an error. `methods` contains the
    names of all methods, those of expanded grids included.

    Raises:
        KairosError: this call has changed dvc.yaml, which DVC has read before. The message tells the user to commit the
            file and run the command again.
    """
    written_methods = yaml.safe_load(Path(RECORDED).read_text(encoding="utf-8")).get("methods", {})
    # DVC expands ${methods} from params.yaml, but neither a grid nor methods of the file that params.yaml extends
    are_all_written = list(written_methods) == methods
    names = "${methods}" if are_all_written else json.dumps(methods)
    text = _STAGES_FILE.read_text(encoding="utf-8")
    method_line = r"(?m)^( +method: ).*$"  # such as "      method: ${methods}"
    # the replacement is a function, because `re.sub` would interpret backslashes in a text
    updated = re.sub(method_line, lambda match: match[1] + names, text)
    if updated != text:
        write_text(_STAGES_FILE, updated)
        source = f"reads the methods from {RECORDED}" if are_all_written else f"lists the methods of {RECORDED}"
        raise KairosError(f"{_STAGES_FILE} now {source}; commit it and run the command again")


def _update_plugin_files(plugins: list[str]) -> None:
    """Set the plugin files in the line ``deps:`` of workflow/dvc.yaml, after params.yaml and the two source folders.

    They include the files that plugin files import from their folders. If the line is up to date or missing,
    workflow/dvc.yaml is left as it is, without an error. `plugins` is the field of the experiment.

    Raises:
        KairosError: this call has changed workflow/dvc.yaml, which DVC has read before. The message tells the user to
            commit the file and run the command again.
    """
    text = _FIRST_STAGE_FILE.read_text(encoding="utf-8")
    plugin_files = "".join(f", {json.dumps(file)}" for file in source_files(plugins))
    deps_line = r"(?m)^( +deps: \[params\.yaml, src/kairos, library/src/kairos_timesteps).*\]$"
    updated = re.sub(deps_line, lambda match: f"{match[1]}{plugin_files}]", text)
    if updated != text:
        write_text(_FIRST_STAGE_FILE, updated)
        message = f"{_FIRST_STAGE_FILE} now lists the plugin files of {RECORDED}"
        raise KairosError(f"{message}; commit it and run the command again")


# --------------------------------------------------------------------------------- both records: run, record, adopt


def run_stage(config: Path, stage: str, method: str | None, seed: int | None) -> None:
    """Replace this process by a Snakemake that runs the jobs of one stage; the stages in dvc.yaml call this.

    The function does not return, unless it raises an error. The process ends with Snakemake's exit status.
    `method` and `seed` select the training run of a stage of training runs; they are None for other stages.

    Raises:
        ConfigError: the experiment is not valid, or see `select_jobs`.
    """
    rules, targets = select_jobs(create_layout(load(config)), stage, method, seed)
    command = [*_PYTHON, "snakemake", "--configfile", str(config), "--allowed-rules", *rules, "--", *targets]
    os.execve(command[0], command, _environment())


def select_jobs(layout: Layout, stage: str, method: str | None, seed: int | None) -> tuple[list[str], list[str]]:
    """Return the Snakemake rules of a stage, and the targets that require all jobs of these rules.

    The targets are rules or, for a stage of training runs, the checksum file of each segment of one training run. Stage
    ``report`` includes the analyses and, if tracking is enabled, the import into MLflow.

    Args:
        layout: layout of the experiment.
        stage: name of the stage.
        method: name of the method, for a stage of training runs; None for other stages.
        seed: seed of the training run, for a stage of training runs; None for other stages.

    Raises:
        ConfigError: the experiment does not have the stage, or `method` and `seed` are missing, unknown or superfluous.
    """
    stages = (*layout.shared_stages, *TRAINING_STAGES, "report")
    demand(stage in stages, "ledger run", f"stage {stage!r}", ", ".join(stages))

    # a stage of training runs
    if stage in TRAINING_STAGES:
        if method not in layout.methods or seed not in layout.experiment.seeds:
            allowed = f"a method of {layout.methods} and a seed of {layout.experiment.seeds}"
            raise rejection(f"ledger run {stage}", f"--method {method} --seed {seed}", allowed)
        rules_of_segments = [
            f"{rule}{segment.suffix}" for rule in layout.stage_rules(stage) for segment in layout.segments
        ]
        checksum_files = [layout.checksum_file(stage, method, seed, segment) for segment in layout.segments]
        return rules_of_segments, checksum_files

    # a stage that all training runs share
    if method is not None or seed is not None:
        got = f"--method {method} --seed {seed}"
        raise rejection(f"ledger run {stage}", got, "neither, as all training runs share this stage")
    if stage == "report":
        # DVC has no stages for the analyses, nor for the import into MLflow, whose database is not shared
        all_rules = layout.count_jobs().keys()
        analysis_rules = [rule for rule in all_rules if rule.startswith(("measure_", "analyse_"))]
        targets = ["report", "track"] if layout.experiment.tracking.enabled else ["report"]
        return [*analysis_rules, *targets], targets
    rules = layout.stage_rules(stage)
    # rule encode merges the shards of rule encode_shards, which has wildcards and is therefore not a target
    return rules, [rule for rule in rules if not rule.endswith("_shards")]


def record() -> None:
    """Record in DVC the results of params.yaml that Snakemake has computed: fill DVC's cache and write dvc.lock.

    The machines of the results are written to dvc.machines.json, which stays as it is if no result has a record of its
    machine. The table of dependencies is written into the results folder. Nothing is committed to git: the function
    logs the git command, or that dvc.lock is up to date.

    Raises:
        KairosError: results are stale; git, Snakemake or DVC fails; the working tree has changes other than dvc.lock,
            workflow/dvc.lock and dvc.machines.json; or dvc.yaml or workflow/dvc.yaml had to be changed, see
            `write_dependencies`.
    """
    record_files = [
        str(path) for path in (_LOCK_FILE, _FIRST_STAGE_FILE.with_suffix(".lock"), _machines_file(_LOCK_FILE))
    ]
    uncommitted = [line for line in _changed_files() if line[3:] not in record_files]  # line: " M path" or "?? path"
    if uncommitted:
        reason = "the working tree has uncommitted changes, so the results could not be reproduced from a commit"
        raise KairosError("\n".join([f"record: {reason}; commit them first:", *uncommitted[:_MOST_LINES]]))
    _check_up_to_date("record: results are stale; run `make demo` first.")
    results = Path(create_layout(load(RECORDED)).results)
    write_dependencies(Path(RECORDED), results / "dependencies.yaml")
    _write_lock()
    machines = _list_machines(results)
    if machines:  # adopted results come without machines; the recorded ones then stay
        write_json(_machines_file(_LOCK_FILE), {"machines": machines})
    if _changed_files(*record_files):
        log(f"recorded in dvc.lock; commit it: git add {' '.join(record_files)} && git commit")
    else:
        log("dvc.lock is up to date already")


def _write_lock() -> None:
    """Write dvc.lock and DVC's cache from the results as they are.

    Raises:
        KairosError: DVC fails. An earlier dvc.lock is then restored; without one, the file is left as DVC has left it.
            The lock of workflow/dvc.yaml is not restored.
    """
    previous_lock = _LOCK_FILE.read_text(encoding="utf-8") if _LOCK_FILE.exists() else None
    _LOCK_FILE.unlink(missing_ok=True)  # DVC would keep stages in it that dvc.yaml no longer has
    process = _run_tool("dvc", "commit", "--force")
    if process.returncode:
        if previous_lock is not None:
            write_text(_LOCK_FILE, previous_lock)
        raise KairosError(f"record: dvc commit failed:\n{process.stderr.strip()}")


def adopt() -> None:
    """Pull the recorded results of params.yaml into this clone, and mark them as computed for Snakemake and DVC.

    The results are imported into MLflow if the experiment enables tracking; an import that fails is not an error. The
    last checks run after the results are in place: an error of a check does not undo the adoption.

    Raises:
        KairosError: nothing is recorded, the data cannot be pulled, Snakemake fails, it would still run jobs, or files
            differ from dvc.lock.
    """
    layout = create_layout(load(RECORDED))
    if not _LOCK_FILE.exists():
        raise KairosError("adopt: dvc.lock is missing, so nothing was recorded; `make demo` computes the results")
    _pull()

    # mark the results as computed
    quiet = ("--quiet", "all", "--configfile", RECORDED)
    # --touch starts no process, so the number of cores need not match the machine. The cost of a selection grows with
    # the number of remaining jobs; with many cores it takes up to 100 jobs (scheduler-subsample), not one per core
    touch = ("--touch", "--forceall", "--cores", "1000")
    if _run_tool("snakemake", *touch, *quiet, "--", "report", captured=False).returncode:
        raise KairosError("adopt: snakemake --touch failed, see above")
    if layout.experiment.tracking.enabled:
        _run_tool("snakemake", *quiet, "--allowed-rules", "track", "--", "track", captured=False)

    # check that neither Snakemake nor DVC would run anything; an error does not undo the adoption
    _check_up_to_date("adopt: the recorded results do not belong to this working tree.")
    _run_tool(
        "dvc", "repro", str(_FIRST_STAGE_FILE)
    )  # writes the table of dependencies; after a failure, `dvc status` fails
    if _run_tool("dvc", "status", "--quiet").returncode:
        raise KairosError("adopt: files differ from dvc.lock; `dvc status` lists them")
    log(f"adopted: {layout.results}/report.html; nothing to rerun for snakemake and dvc")


def _pull() -> None:
    """Bring the recorded results into the working tree, from DVC's cache or, if it lacks some, from its default remote.

    A remote is not required if the cache has all results.

    Raises:
        KairosError: no remote is configured, or DVC cannot pull everything. The message shows the first remote in DVC's
            list, which is the default one in a clone with a single remote.
    """
    if _run_tool("dvc", "checkout").returncode == 0:
        return
    remotes = _run_tool("dvc", "remote", "list")
    if not remotes.stdout.strip():
        raise KairosError(f"adopt: no DVC remote is configured. {_SET_REMOTE}")
    if _run_tool("dvc", "pull").returncode:
        name, location = remotes.stdout.split()[:2]  # line: name and location of the first remote
        reason = "it cannot be reached from here, or `dvc push` was not run where the results were recorded"
        advice = _SET_REMOTE.replace("add --local", "add --force --local")  # replaces the remote that exists
        raise KairosError(f"adopt: the recorded data are not all at {location} (remote {name}): {reason}. {advice}")


def _check_up_to_date(problem: str) -> None:
    """Check by a dry run that Snakemake would run nothing for params.yaml.

    Raises:
        KairosError: Snakemake would run jobs, and the message is `problem` with a table of the jobs; or Snakemake
            fails, and the message is its output.
    """
    process = _run_tool("snakemake", "--configfile", RECORDED, "--dry-run")
    output = process.stdout + process.stderr
    if process.returncode:
        raise KairosError(f"snakemake --dry-run failed:\n{output.strip()}")
    if "Nothing to be done" not in output:
        table_start = output.find("Job stats:")
        job_table, *_ = output[table_start:].split("\n\n")  # Snakemake's table ends at an empty line
        raise KairosError(f"{problem} Snakemake would run:\n{job_table.strip()}")


def _changed_files(*paths: str) -> list[str]:
    """Return the lines of ``git status --porcelain`` for `paths`, or for all files if `paths` is empty.

    Each uncommitted file has a line, such as `` M params.yaml`` or ``?? new.txt``.

    Raises:
        KairosError: git fails.
    """
    process = subprocess.run(["git", "status", "--porcelain", "--", *paths], capture_output=True, text=True)
    if process.returncode:
        raise KairosError(f"git status: {process.stderr.strip()}")
    return process.stdout.splitlines()


def _run_tool(tool: str, *arguments: str, captured: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a command line tool of this Python environment; a failure is only in the return code of the result.

    The output is in the result as text if `captured` is set; otherwise it goes to the terminal.
    """
    return subprocess.run([*_PYTHON, tool, *arguments], env=_environment(), capture_output=captured, text=True)


def _environment() -> dict[str, str]:
    """Return this process's environment without telemetry of tools, and with this Python's folder first in PATH."""
    tools = os.path.dirname(sys.executable)
    return {**os.environ, **_NO_TELEMETRY, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}


# ------------------------------------------------------------------------- comparison of the files with a lock file


def compare(lock: Path) -> Iterator[tuple[str, str, str]]:
    """Compare every output in a lock file with the file or folder on disk.

    Args:
        lock: a dvc.lock; its paths are relative to its folder.

    Yields:
        The path of an output; ``same``, ``differs``, ``missing`` or ``not compared``; and the reason, empty for
        ``same``. Outputs that contain clock times are not compared. All outputs are hashed before the first result. The
        outputs are in the order of the lock file.

    Raises:
        KairosError: the lock file cannot be read; raised when the first result is requested.
    """
    try:
        stages: dict[str, Any] = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"]
    except (OSError, LookupError, TypeError, yaml.YAMLError) as error:
        raise KairosError(f"--against: {lock} cannot be read ({error}); pass the dvc.lock of a recording") from None
    outputs = [(stage, output) for stage in stages.values() for output in stage.get("outs", [])]
    digests: dict[str, str] = {}
    # paths of all outputs that differ, before the first result: the reason for a difference may be an input
    different: set[str] = set()
    for _, output in outputs:
        path = output["path"]
        if not _has_clock_times(path):
            digests[path] = hash_path(lock.parent / path)
            if digests[path] != output["md5"]:
                different.add(path)
    for stage, output in outputs:
        path = output["path"]
        if path not in digests:
            yield path, "not compared", "holds clock times"
        elif path in different:
            result = "differs" if digests[path] else "missing"
            yield path, result, _explain(stage, lock, different)
        else:
            yield path, "same", ""


def hash_path(path: Path) -> str:
    """Return DVC's hash of a file or folder, or an empty text if the path does not exist.

    DVC's hash of a file is its MD5 in hex digits. The hash of a folder is the MD5 of a JSON list of all files below it
    with their hashes, followed by ``.dir``. Temporary files, which .dvcignore excludes, are left out.
    """
    if not path.exists():
        return ""
    if not path.is_dir():
        return hashlib.md5(path.read_bytes()).hexdigest()
    relative_paths = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    names = sorted(file.as_posix() for file in relative_paths if not _is_temporary(file))
    entries = [{"md5": hash_path(path / name), "relpath": name} for name in names]
    folder_content = json.dumps(entries, sort_keys=True)
    return hashlib.md5(folder_content.encode()).hexdigest() + ".dir"


def _is_temporary(file: Path) -> bool:
    """Return True if a part of a path begins with ``.tmp-``: .dvcignore excludes such leftovers of killed processes."""
    return any(part.startswith(".tmp-") for part in file.parts)


def _has_clock_times(path: str) -> bool:
    """Return True if a part of an output's path is in `_NAMES_WITH_CLOCK_TIMES`, outputs that differ in every run."""
    return any(part in _NAMES_WITH_CLOCK_TIMES for part in Path(path).parts)


def _explain(stage: dict[str, Any], lock: Path, different: set[str]) -> str:
    """Return why an output of a stage differs, as one line.

    The reasons are changed settings or code. Without such changes they are inputs that differ, and other machines.
    If nothing differs, the line is ``no record gives the reason``.

    Args:
        stage: entry of the stage in the lock file.
        lock: the lock file.
        different: paths of all outputs that differ.
    """
    changed_params = _changed_params(stage, lock)
    if changed_params:
        return f"changed settings or code: {', '.join(changed_params)}"
    changed_inputs = []
    for dependency in stage.get("deps", []):
        path = dependency["path"]
        # the input is an output that differs, or a file in such a folder
        if any(Path(path).is_relative_to(output) for output in different):
            changed_inputs.append(path)
    reasons = [f"follows from {', '.join(changed_inputs)}"] if changed_inputs else []
    reasons += _compare_machines(lock, stage)
    return "; ".join(reasons) or "no record gives the reason"


def _changed_params(stage: dict[str, Any], lock: Path) -> list[str]:
    """Return the names of a stage's recorded fields whose present values differ, as ``train.uniform.fields.model``.

    The present values are in the parameter files, such as dependencies.yaml. Files that do not exist are skipped, and a
    field that a file lacks has the present value None. Fields that the lock file lacks are not compared.
    """
    changed: list[str] = []
    for file, recorded_table in stage.get("params", {}).items():
        path = lock.parent / file
        if not path.exists():  # DVC has not run here
            continue
        present_table = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key, recorded_fields in recorded_table.items():
            # for key "train.uniform.fields", find present_table["train"]["uniform"]["fields"]
            fields = present_table
            for name in key.split("."):
                fields = fields.get(name, {})
            for field, recorded_value in recorded_fields.items():
                if fields.get(field) != recorded_value:
                    changed.append(f"{key}.{field}")
    return changed


def _compare_machines(lock: Path, stage: dict[str, Any]) -> list[str]:
    """Return a text for each fact that differs between the machines of the recorded and of the present results.

    An example is ``torch differs: 2.8 when recorded, 2.9 now``. The result is empty if all facts of `_MACHINE_FACTS`
    are equal. If the list of the recorded machines is missing, the only text is that they are unknown.

    Args:
        lock: the dvc.lock; a file next to it lists the machines of the recorded results.
        stage: any stage of the lock, whose outputs are in the experiment's results folder.
    """
    machines_file = _machines_file(lock)
    if not machines_file.exists():
        return [f"the machine of the recording is unknown ({machines_file.name} is missing)"]
    recorded_machines = read_json(machines_file)["machines"]
    output = Path(stage["outs"][0]["path"])
    experiment_folder = Path(*output.parts[:2])  # results/<experiment>
    present_machines = _list_machines(lock.parent / experiment_folder)
    reasons = []
    for fact in _MACHINE_FACTS:
        then = _join_values(recorded_machines, fact)
        now = _join_values(present_machines, fact)
        if then != now:
            reasons.append(f"{fact.replace('_', ' ')} differs: {then} when recorded, {now} now")
    return reasons


def _join_values(machines: list[dict[str, str]], fact: str) -> str:
    """Return the distinct values of a fact over machines as text, sorted, such as ``2.8/2.9``.

    The value of a machine without the fact, and the text without machines, is ``?``.
    """
    return "/".join(sorted({machine.get(fact, "?") for machine in machines})) or "?"


def _list_machines(results: Path) -> list[dict[str, str]]:
    """Return the facts of each machine that computed an experiment (CPU, instruction set, versions), each machine once.

    They are read from the timing files below `results`, in the order of their paths. Timing files without a machine
    are skipped.

    Raises:
        DamagedError: a timing file is damaged.
    """
    timing_files = sorted(results.glob("timing/**/*.json"))
    machines = [read_json(path).get("machine") for path in timing_files]
    # equal machines have equal JSON texts
    machine_by_text = {json.dumps(machine, sort_keys=True): machine for machine in machines if machine is not None}
    return list(machine_by_text.values())


def _machines_file(lock: Path) -> Path:
    """Return the path of the file with the machines of a recording: dvc.machines.json next to dvc.lock."""
    return lock.with_suffix(".machines.json")
