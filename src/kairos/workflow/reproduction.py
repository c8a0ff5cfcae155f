"""Comparison of the files on disk with a dvc.lock: which outputs differ, and why as far as records tell."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kairos.files import read_json
from kairos_timesteps.errors import KairosError

CLOCKED = ("report.html", "summary.csv", "figures", "timing", "timing.jsonl")  # hold clock times: never the same twice


def machines(results: Path) -> list[dict[str, str]]:
    """Processor, instruction set and versions that the jobs of an experiment name beside their times."""
    found = [read_json(path).get("machine") for path in sorted(results.glob("timing/**/*.json"))]
    return list({json.dumps(machine, sort_keys=True): machine for machine in found if machine is not None}.values())


def provenance(lock: Path) -> Path:
    """Return the path, next to the lock file, where `kairos ledger record` writes the machines."""
    return lock.with_suffix(".machines.json")


def digest(path: Path) -> str:
    """DVC's hash of a file or folder; empty where there is none."""
    if not path.is_dir():
        return hashlib.md5(path.read_bytes()).hexdigest() if path.exists() else ""
    every = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    whole = (file for file in every if not any(part.startswith(".tmp-") for part in file.parts))  # as .dvcignore has it
    files = sorted(file.as_posix() for file in whole)
    listed = [{"md5": digest(path / file), "relpath": file} for file in files]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"


def compare(lock: Path) -> Iterator[tuple[str, str, str]]:
    """Yield path, ``same``, ``differs``, ``missing`` or ``not compared``, and the reason, for each stage's outputs.

    Raises:
        KairosError: there is no such lock file.
    """
    try:
        stages: dict[str, Any] = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"]
    except (OSError, LookupError, TypeError, yaml.YAMLError) as error:
        raise KairosError(f"--against: {lock} cannot be read ({error}); pass the dvc.lock of a recording") from None
    outs = {out["path"]: (name, out["md5"]) for name, stage in stages.items() for out in stage.get("outs", [])}
    clocked = {path for path in outs if set(Path(path).parts) & set(CLOCKED)}
    found = {path: digest(lock.parent / path) for path in outs if path not in clocked}
    different = {path for path in found if found[path] != outs[path][1]}
    for path, (name, _) in outs.items():
        if path in clocked:
            yield path, "not compared", "holds clock times"
        elif path in different:
            yield path, "differs" if found[path] else "missing", _why(stages[name], lock, different)
        else:
            yield path, "same", ""


def _why(stage: dict[str, Any], lock: Path, different: set[str]) -> str:
    changed: list[str] = []
    for file, table in stage.get("params", {}).items():
        if not (path := lock.parent / file).exists():  # DVC has not run here
            continue
        now = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key, then in table.items():
            here = now
            for part in key.split("."):
                here = here.get(part, {})
            changed += [f"{key}.{field}" for field in then if here.get(field) != then[field]]
    if changed:
        return f"changed settings or code: {', '.join(changed)}"
    read = [dep["path"] for dep in stage.get("deps", [])]
    from_other = [path for path in read if any(Path(path).is_relative_to(out) for out in different)]
    reasons = [f"follows from {', '.join(from_other)}"] if from_other else []
    return "; ".join(reasons + _other_machine(lock, stage)) or "no record tells why"


def _other_machine(lock: Path, stage: dict[str, Any]) -> list[str]:
    if not provenance(lock).exists():
        return [f"where it was recorded is unknown ({provenance(lock).name} is absent)"]
    recorded = read_json(provenance(lock))["machines"]
    here = machines(lock.parent / "/".join(Path(stage["outs"][0]["path"]).parts[:2]))
    reasons = []
    for fact in ("processor", "instruction_set", "torch", "numpy", "libc", "python"):
        then, now = ("/".join(sorted({one.get(fact, "?") for one in known})) for known in (recorded, here))
        if then != now:
            reasons.append(f"other {fact.replace('_', ' ')}: {then} then, {now} now")
    return reasons
