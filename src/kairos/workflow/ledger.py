"""The two ledgers of what has been computed, Snakemake's and DVC's, and how they are kept in step."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from kairos.config import load
from kairos.config.plugins import source_files
from kairos.files import write_json, write_text
from kairos.progress import say
from kairos.workflow import dependencies
from kairos.workflow.layout import Layout, lay_out
from kairos.workflow.reproduction import machines, provenance
from kairos_timesteps.errors import ConfigError, KairosError, demand, rejection

_PYTHON = (sys.executable, "-m")
_STAGES = Path("dvc.yaml")
_FIRST = Path("workflow/dvc.yaml")  # its stage writes what those depend on, its lock follows every byte of the code
RECORDED = "params.yaml"  # the experiment that dvc.yaml is about
_QUIET = {"DVC_NO_ANALYTICS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}


def write_dependencies(config: Path, out: Path) -> None:
    """Write fields and code fingerprint of every stage as YAML, a training's stages by method: DVC's ``params``.

    The file is left alone where nothing has changed.

    Raises:
        ConfigError: dvc.yaml lacks a stage that the experiment has.
        KairosError: dvc.yaml has just been made to follow a grid of the experiment's methods, or its plugins.
    """
    layout = lay_out(load(config))
    if _STAGES.is_file() and str(config) == RECORDED:
        _follow(layout.methods)
        _follow_plugins(layout.experiment.plugins)
    stages = yaml.safe_load(_STAGES.read_text(encoding="utf-8"))["stages"] if _STAGES.is_file() else layout.shared
    if missing := set(layout.shared) - set(stages):
        advice = "add it in the manner of autoencoder, and its manifest to the deps of encode"
        raise ConfigError(f"{config}: {_STAGES} has no stage {', '.join(sorted(missing))}; {advice}")
    table: dict[str, Any] = {
        stage: dependencies.collect_params(stage, layout.plain) for stage in (*layout.shared, "report")
    }
    for stage, method in product(dependencies.TRAINING_STAGES, layout.methods):
        place = table.setdefault(stage, {})
        for part in method.split("."):  # DVC looks for a key part by part
            place = place.setdefault(part, {})
        place["fields"] = dependencies.collect_params(stage, layout.plain, method)
        place["fields"] |= {"milestones": list(layout.experiment.milestones)}
    text = yaml.safe_dump(json.loads(json.dumps(table)), sort_keys=True)  # no value twice, so no YAML anchors
    if not out.exists() or out.read_text(encoding="utf-8") != text:
        write_text(out, text)


def _follow(methods: list[str]) -> None:
    """Name the methods in dvc.yaml where those in params.yaml have a grid, which DVC cannot write out."""
    given = yaml.safe_load(Path(RECORDED).read_text(encoding="utf-8"))["methods"]
    text, names = _STAGES.read_text(encoding="utf-8"), "${methods}" if list(given) == methods else json.dumps(methods)
    followed = re.sub(r"(?m)^( +method: ).*$", lambda found: found[1] + names, text)
    if followed != text:
        write_text(_STAGES, followed)
        raise KairosError(f"{_STAGES} now names the methods of {RECORDED}, grids written out; commit it and call again")


def _follow_plugins(plugins: list[str]) -> None:
    """Update the dependencies in workflow/dvc.yaml with the files of plugins."""
    text, files = _FIRST.read_text(encoding="utf-8"), source_files(plugins)
    listed = "".join(f", {json.dumps(file)}" for file in files)
    followed = re.sub(
        r"(?m)^( +deps: \[params\.yaml, src/kairos, library/src/kairos_timesteps).*\]$", rf"\1{listed}]", text
    )
    if followed != text:
        write_text(_FIRST, followed)
        raise KairosError(f"{_FIRST} now lists the plugin files of {RECORDED}; commit it and call again")


def targets(layout: Layout, stage: str, method: str | None, seed: int | None) -> tuple[list[str], list[str]]:
    """The rules of a stage, and what to ask Snakemake for, so that no job of it is left out.

    Raises:
        ConfigError: the experiment has no such stage, or it needs a method and a seed of the experiment, or has none.
    """
    rules, stages = layout.rules(stage), (*layout.shared, *dependencies.TRAINING_STAGES, "report")
    demand(stage in stages, "ledger run", f"stage {stage!r}", ", ".join(stages))
    if stage in dependencies.TRAINING_STAGES:
        allowed = f"a method of {layout.methods} and a seed of {layout.experiment.seeds}"
        if method not in layout.methods or seed not in layout.experiment.seeds:
            raise rejection(f"ledger run {stage}", f"--method {method} --seed {seed}", allowed)
        sums = [layout.sums(stage, method, seed, segment) for segment in layout.segments]
        return [f"{rule}{segment.name}" for rule in rules for segment in layout.segments], sums
    if method is not None or seed is not None:
        raise ConfigError(f"ledger run {stage}: has neither --method nor --seed")
    named = [rule for rule in rules if not rule.endswith("_parts")]
    if stage == "report":  # its analyses are no stages of DVC's
        rules = ["report", *(rule for rule in layout.jobs() if rule.startswith(("measure_", "analyse_")))]
        if layout.experiment.tracking.enabled:
            rules, named = [*rules, "track"], ["report", "track"]  # nor is the import into MLflow, this machine's own
    return rules, named


def run_stage(config: Path, stage: str, method: str | None, seed: int | None) -> None:
    """Become a Snakemake that runs exactly one stage's jobs of the DAG: what DVC's stages call."""
    rules, files = targets(lay_out(load(config)), stage, method, seed)
    command = [*_PYTHON, "snakemake", "--configfile", str(config), "--allowed-rules", *rules, "--", *files]
    os.execve(command[0], command, _environment())


def _run(tool: str, *arguments: str, captured: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a tool of this environment."""
    return subprocess.run([*_PYTHON, tool, *arguments], env=_environment(), capture_output=captured, text=True)


def _check_up_to_date(otherwise: str) -> None:
    """Fail where Snakemake would still run something for the recorded experiment, and say what, after `otherwise`."""
    done = _run("snakemake", "--configfile", RECORDED, "--dry-run")
    output = done.stdout + done.stderr
    if done.returncode:
        raise KairosError(f"snakemake --dry-run failed:\n{output.strip()}")
    if "Nothing to be done" not in output:
        jobs = output[output.find("Job stats:") :].split("\n\n")[0].strip()
        raise KairosError(f"{otherwise} Snakemake would run:\n{jobs}")


def _changed(*paths: str) -> list[str]:
    """Return the changes that ``git status`` shows for some paths, a line for each file."""
    done = subprocess.run(["git", "status", "--porcelain", "--", *paths], capture_output=True, text=True)
    if done.returncode:
        raise KairosError(f"git status: {done.stderr.strip()}")
    return done.stdout.splitlines()


def _environment() -> dict[str, str]:
    tools = os.path.dirname(sys.executable)
    return {**os.environ, **_QUIET, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}


def record() -> None:
    """Version what Snakemake has just computed: DVC's cache and dvc.lock get the results as they are.

    Raises:
        KairosError: results are stale, or the tree differs from the commit that they would be recorded with.
    """
    written = ("dvc.lock", str(_FIRST.with_suffix(".lock")), str(provenance(Path("dvc.lock"))))
    if dirty := [line for line in _changed() if line[3:] not in written]:
        fault = "the tree has changes that no commit holds, so the results could not be reproduced from one"
        raise KairosError("\n".join([f"record: {fault}; commit them first:", *dirty[:20]]))
    _check_up_to_date("record: results are stale; run `make demo` first.")
    results = Path(lay_out(load(RECORDED)).results)
    write_dependencies(Path(RECORDED), results / "dependencies.yaml")
    lock = Path(written[0])
    before = lock.read_text(encoding="utf-8") if lock.exists() else None
    lock.unlink(missing_ok=True)  # DVC would keep stages in it that dvc.yaml no longer has
    done = _run("dvc", "commit", "--force")
    if done.returncode:
        if before is not None:
            write_text(lock, before)
        raise KairosError(f"record: dvc commit failed:\n{done.stderr.strip()}")
    if known := machines(results):  # adopted results bring none: who computed them is on record
        write_json(written[2], {"machines": known})
    commit = f"recorded in dvc.lock; commit it: git add {' '.join(written)} && git commit"
    say(commit if _changed(*written) else "dvc.lock has it already")


def adopt() -> None:
    """Make the recorded results this clone's own: pull them, and put them into Snakemake's ledger.

    Raises:
        KairosError: there is no remote, it cannot be reached, or something would still have to run.
    """
    found = lay_out(load(RECORDED))
    if not Path("dvc.lock").exists():
        raise KairosError("adopt: no dvc.lock here, so nothing was recorded; `make demo` computes the results")
    _pull()
    quiet = ("--quiet", "all", "--configfile", RECORDED)
    if _run("snakemake", "--touch", "--forceall", *quiet, "--", "report", captured=False).returncode:
        raise KairosError("adopt: snakemake --touch failed, see above")
    if found.experiment.tracking.enabled:
        _run("snakemake", *quiet, "--allowed-rules", "track", "--", "track", captured=False)
    _check_up_to_date("adopt: the recorded results do not belong to this tree.")
    _run("dvc", "repro", str(_FIRST))
    if _run("dvc", "status", "--quiet").returncode:
        raise KairosError("adopt: dvc status is not clean; `dvc status` says what has changed since it was recorded")
    say(f"adopted: {found.results}/report.html; nothing to rerun for snakemake and dvc")


def _pull() -> None:
    if not _run("dvc", "checkout").returncode:  # everything is in this clone's cache
        return
    remotes = _run("dvc", "remote", "list")
    how = (
        "Name where the recorded data lie, for this clone alone:\n"
        "  dvc remote add --local --default store PATH_OR_URL\n"
        "and call `make adopt` again. Without such a place, `make demo` computes the same results."
    )
    if not remotes.stdout.strip():
        raise KairosError(f"adopt: no DVC remote is configured. {how}")
    if _run("dvc", "pull").returncode:
        name, place = remotes.stdout.split()[:2]
        why = "it cannot be reached from here, or `dvc push` was not called where they were recorded"
        how = how.replace("add --local", "add --force --local")
        raise KairosError(f"adopt: the recorded data are not all at {place} (remote {name}): {why}. {how}")
