"""Mutation test of the modules that decide correctness: ``python .ci/mutants.py``.

A mutant is a copy of the source with one changed operator, constant, condition, return value or statement. The script
runs the quick tests that execute the changed line. A mutant that no test detects "survives": a check is missing, or the
change makes no difference. Mutants are the same for the same seed, count and source.
"""

import argparse
import ast
import collections
import importlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"kairos": "src", "kairos_timesteps": "library/src"}  # of each package

MODULES = [
    *(f"kairos.training.{name}" for name in ("checkpoint", "run_folder", "state", "lengths", "identity")),
    *(f"kairos_timesteps.samplers.{name}" for name in ("fixed", "log_snr", "combined", "speed", "losses")),
    *(f"kairos_timesteps.{name}" for name in ("base", "coordinates", "weightings.fixed", "incomplete_beta", "numeric")),
    *(
        f"kairos.{name}"
        for name in ("report.ranking", "report.compare", "evaluation.measurements", "evaluation.metrics")
    ),
    *("kairos_timesteps.diffusion.schedule", "kairos_timesteps.diffusion.processes", "kairos.data.batches"),
    *("kairos_timesteps.randomness", "kairos.files"),
]

# Test files with quick tests. A first run without a mutant measures which test executes which lines, and for how long.
TESTS = [
    *(
        "adaptive",
        "analyses",
        "augment",
        "auto",
        "bad_arguments",
        "combinations",
        "compare",
        "couplings",
        "couplings_in_experiments",
        "data",
        "disk",
    ),
    *(
        "distances",
        "distributed",
        "draws",
        "files",
        "functions",
        "identity",
        "info_noise",
        "interrupts",
        "job",
        "lengths",
        "measured",
    ),
    *("metric_can_rank", "own_loop", "presets", "processes", "published", "published_diffusion"),
    *("published_sampling", "randomness", "ranking", "report", "sampling", "strategies", "strategies_checkpoints"),
    *("strategies_cli", "superresolution", "training", "unfinished"),
]

SECONDS_A_MUTANT = 20  # tests are added, quickest first, until their CPU time without a mutant exceeds this
TEST_FOLDERS = ("library/tests", "tests")
LIBRARIES = ["torch", "numpy", "scipy.stats", "scipy.linalg", "PIL.Image", "yaml", "pytest", "hypothesis"]

COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
COMPARISONS |= {new: old for old, new in COMPARISONS.items()}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
ARITHMETIC |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult}
CALLS = {"min": "max", "minimum": "maximum", "floor": "ceil", "any": "all", "argmin": "argmax", "zeros": "ones"}
CALLS |= {new: old for old, new in CALLS.items()}
ONLY_MESSAGES = {"print", "warn", "info", "warning", "debug", "log", "say"}


def source_of(module: str) -> str:
    """Return the path of a module's source in the repository."""
    return f"{FOLDERS[module.partition('.')[0]]}/{module.replace('.', '/')}.py"


Line = tuple[str, int]  # module and line number
Record = tuple[set[Line], dict[str, set[Line]], dict[str, float]]  # lines that imports execute; lines, seconds by test


@dataclass(frozen=True)
class Mutant:
    """Replacement of the bytes from ``start`` to ``end`` in the source of a module; any of ``lines`` executes it."""

    module: str
    line: int
    lines: frozenset[Line]
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        """Location and change on one line."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{source_of(self.module)}:{self.line}: {before} -> {after}"


def find_replacements(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the replacements of a node: the part of it whose source is replaced, and the new text."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                operators = [*node.ops]
                operators[index] = COMPARISONS[type(operator)]()
                yield node, f"({ast.unparse(ast.Compare(node.left, operators, node.comparators))})"
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield node, f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
        case ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield node, ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Constant(value=float()):
            yield node, repr(node.value * 1.1 or 1.0)
        case ast.Call(func=ast.Name() | ast.Attribute() as function):
            text = ast.unparse(function)
            owner, _, name = text.rpartition(".")
            if name in CALLS:
                yield function, f"{owner}.{CALLS[name]}" if owner else CALLS[name]
        case ast.Expr(value=ast.Call(func=function)) if ast.unparse(function).split(".")[-1] not in ONLY_MESSAGES:
            yield node, "pass"
        case ast.Raise():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield node, "return None"
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            pass
        case ast.If(test=test) | ast.IfExp(test=test) if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, f"(not {ast.unparse(test)})"


def children_to_mutate(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that can change behaviour: no annotations, decorators, messages or texts."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.Raise() | ast.JoinedStr() | ast.Assert():
            return []
        case ast.FunctionDef():
            defaults = [default for default in node.args.kw_defaults if default is not None]
            return [*node.args.defaults, *defaults, *node.body]
        case ast.AnnAssign():
            return [node.value] if node.value is not None else []
        case ast.ClassDef():
            return [*node.body]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return [*node.orelse]
        case ast.Call() if ast.unparse(node.func).split(".")[-1] in ONLY_MESSAGES:
            return []
    return list(ast.iter_child_nodes(node))


def list_mutants(module: str, root: Path) -> list[Mutant]:
    """List all mutants of a module."""
    source = (root / source_of(module)).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: list[Mutant] = []

    def visit(node: ast.AST, statement: ast.stmt | None) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        for old, text in find_replacements(node):
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            numbers = {statement.lineno, *range(old.lineno, old.end_lineno + 1)}
            lines = frozenset((module, number) for number in numbers)
            mutants.append(Mutant(module, old.lineno, lines, start, end, source[start:end].decode(), text))
        for part in children_to_mutate(node):
            visit(part, statement)

    visit(ast.parse(source), None)
    return mutants


def draw_mutants(modules: list[str], count: int, seed: int, root: Path) -> list[Mutant]:
    """Draw mutants without repetition from all mutants of the modules, so that long modules have more of them."""
    everything = [mutant for module in modules for mutant in list_mutants(module, root)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def copy_repository(root: Path) -> None:
    """Copy what git lists (with changes that are not committed) and link the environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    if (ROOT / ".venv").exists():
        (root / ".venv").symlink_to(ROOT / ".venv")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def find_test_files(root: Path) -> list[str]:
    """Return the path of each file of TESTS, relative to the root.

    Raises:
        FileNotFoundError: neither folder has a file of TESTS.
    """
    files = []
    for name in TESTS:
        paths = [f"{folder}/test_{name}.py" for folder in TEST_FOLDERS]
        existing = [path for path in paths if (root / path).is_file()]
        if not existing:
            raise FileNotFoundError(f"TESTS: no {' and no '.join(paths)}; correct the name {name!r}")
        files += existing
    return files


class Recorder:
    """Pytest plugin: records for each test the executed lines of MODULES and the CPU seconds.

    What a fixture of a module or session executes counts for every test that uses the fixture.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        self.modules = {str(root / source_of(module)): module for module in MODULES}
        self.imported: set[Line] = set()
        self.executed: dict[str, set[Line]] = {}
        self.seconds: dict[str, float] = {}
        self.current: set[Line] = set()
        self.calls: collections.Counter[CodeType] = collections.Counter()
        self.fixtures: list[tuple[str, str, set[Line], float]] = []
        self.fixture_seconds = 0.0

    def trace(self, frame: FrameType, event: str, argument: object) -> object:
        """Record a line; Python calls this at each call of a function, and at each line of functions of MODULES."""
        module = self.modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        if event == "call":
            self.calls[frame.f_code] += 1
            if self.calls[frame.f_code] > 100:  # a loop: further calls would only cost time
                return None
        self.current.add((module, frame.f_lineno))
        return self.trace

    def pytest_sessionstart(self) -> None:
        """Start to trace, and import all modules so that no test is the one that executes their top level."""
        sys.settrace(self.trace)
        for module in MODULES:
            importlib.import_module(module)
        self.imported = self.current

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """Record a fixture that several tests share."""
        if fixturedef.scope == "function":
            return (yield)
        test_lines, self.current = self.current, set()
        self.calls.clear()
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = cpu_seconds() - start
            self.fixtures.append((fixturedef.argname, fixturedef.baseid, self.current, seconds))
            self.fixture_seconds += seconds
            self.current = test_lines

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record a test, without what earlier tests left in caches."""
        for module in MODULES:
            for value in vars(sys.modules[module]).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        self.current = set()
        self.calls.clear()
        sys.settrace(self.trace)  # again, because hypothesis and errors of recursion end it
        start, self.fixture_seconds = cpu_seconds(), 0.0
        result = yield
        self.executed[item.nodeid] = self.current
        self.seconds[item.nodeid] = cpu_seconds() - start - self.fixture_seconds
        for name, base, lines, seconds in self.fixtures:
            if name in item.fixturenames and item.nodeid.startswith(base):
                self.executed[item.nodeid] |= lines
                self.seconds[item.nodeid] += seconds
        return result

    def pytest_sessionfinish(self) -> None:
        """Write the record to a file, for the parent process."""
        sys.settrace(None)
        self.path.write_bytes(pickle.dumps((self.imported, self.executed, self.seconds)))


class Selection:
    """Pytest plugin: runs the given tests only, in the order of their files."""

    def __init__(self, tests: set[str]) -> None:
        self.tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop all other tests."""
        items[:] = [item for item in items if item.nodeid in self.tests]


def run_tests(root: Path, files: list[str], plugin: object, limit: float) -> str:
    """Run test files in a forked process, which imports kairos again; return "survived", "killed" or "timeout"."""
    child = os.fork()
    if child == 0:
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.setsid()
            output = os.open(root.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(root)
            sys.path[:0] = [str(root / folder) for folder in FOLDERS.values()]
            options = [
                "-c",
                str(root / "pyproject.toml"),  # or pytest derives other test ids from files of one folder
                "-x",
                "-q",
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
                "-m",
                "not long and not cluster and not nightly",
            ]
            options += ["--hypothesis-seed=0", f"--basetemp={root.parent / 'temporary'}"]
            code = pytest.main([*options, *files], plugins=[plugin])
        finally:
            sys.stdout.flush()
            os._exit(int(code))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else "killed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def try_mutant(mutant: Mutant, root: Path, tests: list[str], seconds: dict[str, float]) -> str:
    """Run tests with a mutant in place of the source; return "survived", "killed" or "timeout"."""
    path = root / source_of(mutant.module)
    source = path.read_bytes()
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    limit = 60 + 5 * sum(seconds[test] for test in tests)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    outcome = run_tests(root, files, Selection(set(tests)), limit)
    path.write_bytes(source)
    return outcome


def select_tests(mutant: Mutant, record: Record) -> tuple[list[str], int]:
    """Select the tests of a mutant, quickest first, within a time limit; also return how many execute it."""
    imported, executed, seconds = record
    executing = [test for test, lines in executed.items() if not lines.isdisjoint(mutant.lines)]
    if not executing and not imported.isdisjoint(
        mutant.lines
    ):  # the top level of a module: each test of the module uses it
        executing = [test for test, lines in executed.items() if any(module == mutant.module for module, _ in lines)]
    executing.sort(key=lambda test: seconds[test])
    selected: list[str] = []
    left = SECONDS_A_MUTANT
    for test in executing:
        left -= seconds[test]
        if left < 0 and selected:
            break
        selected.append(test)
    return selected, len(executing)


def try_mutants(options: argparse.Namespace, root: Path) -> list[str]:
    """Run the tests without a mutant, then with each mutant of the sample; return the printed lines."""
    printed: list[str] = []

    def report(line: str) -> None:
        print(line, flush=True)
        printed.append(line)

    copy_repository(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(root / folder) for folder in FOLDERS.values())
    mutants = draw_mutants(options.modules, options.count, options.seed, root)
    path = root.parent / "record"
    if run_tests(root, find_test_files(root), Recorder(root, path), 1800) != "survived":
        sys.exit(f"The tests fail without a mutant:\n{(root.parent / 'log.txt').read_text()[-5000:]}")
    record = pickle.loads(path.read_bytes())
    report(f"{len(record[1])} tests pass without a mutant; {cpu_seconds():.0f} CPU seconds")
    sys.dont_write_bytecode = True  # a mutant is as long as the source may be, and as new: bytecode would look current
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors: list[str] = []
    for mutant in mutants:
        if cpu_seconds() > options.seconds:
            report(f"stopped after {options.seconds:.0f} CPU seconds")
            break
        start = cpu_seconds()
        tests, number = select_tests(mutant, record)
        outcome = "not executed" if not tests else try_mutant(mutant, root, tests, record[2])
        line = f"{outcome}, {len(tests)} of {number} tests, {cpu_seconds() - start:.1f} s: {mutant}"
        report(line)
        counts[mutant.module][outcome] += 1
        if outcome in ("survived", "not executed"):
            survivors.append(line)
    outcomes = ["killed", "timeout", "survived", "not executed"]
    report("\n".join(["", "Survivors:", *survivors, ""]))
    report(f"{'module':40}" + "".join(f"{outcome:>14}" for outcome in outcomes))
    for module in options.modules:
        report(f"{module:40}" + "".join(f"{counts[module][outcome]:14}" for outcome in outcomes))
    sums = [sum(count[outcome] for count in counts.values()) for outcome in outcomes]
    report(f"{'all':40}" + "".join(f"{number:14}" for number in sums))
    report(f"{cpu_seconds():.0f} CPU seconds")
    return printed


def main() -> None:
    """Measure the tests, try the mutants, print the survivors and a table by module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of mutants")
    parser.add_argument("--seconds", type=float, default=3600, help="CPU seconds after which no mutant is started")
    parser.add_argument(
        "--modules", nargs="+", default=MODULES, choices=MODULES, metavar="MODULE", help="such as kairos.files"
    )
    parser.add_argument("--report", type=Path, help="also write the output to this file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        lines = try_mutants(options, Path(folder).resolve() / "repository")
    if options.report:
        options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
