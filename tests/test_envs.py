"""Conda file, container images and bootstrap install the versions of uv.lock; pyproject.toml declares every package."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import grimp
import pytest
import yaml

import kairos_timesteps

ROOT = Path(__file__).resolve().parent.parent
ENVS = ROOT / "envs"


def locked_version(name: str) -> str:
    """Return the version of a package in uv.lock."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    return next(package["version"] for package in lock["package"] if package["name"] == name)


def is_allowed_python(version: str) -> bool:
    """Return True if uv.lock allows a version of Python."""
    least = re.fullmatch(r">=3\.(\d+)", tomllib.loads((ROOT / "uv.lock").read_text())["requires-python"])
    return int(version.split(".")[1]) >= int(least[1])


def test_the_conda_file_has_the_locked_version_of_uv():
    packages = yaml.safe_load((ENVS / "environment.yml").read_text())["dependencies"]
    pip = next(item["pip"] for item in packages if isinstance(item, dict))
    assert pip == [f"uv=={locked_version('uv')}"]
    python = next(item.removeprefix("python=") for item in packages if isinstance(item, str) and "python" in item)
    assert is_allowed_python(python)


@pytest.mark.parametrize(("file", "image"), [("Dockerfile", r"^FROM (\S+)$"), ("kairos.def", r"^From: (\S+)$")])
def test_container_images_install_from_the_lock_file(file, image):
    text = (ENVS / file).read_text()
    base = re.search(image, text, flags=re.MULTILINE)[1]
    assert is_allowed_python(re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)[1])
    assert "uv.lock" in text and "python3 /build/envs/bootstrap.py" in text
    for name in re.findall(r"(?:COPY|^    )\s*([\w./]+(?: [\w./]+)*) /build", text, flags=re.MULTILINE):
        assert all((ROOT / path).exists() for path in name.split()), name


def test_all_container_images_have_the_python_of_the_conda_file():
    text = "".join((ENVS / name).read_text() for name in ("Dockerfile", "kairos.def"))
    conda = re.search(r"python=(\S+)", (ENVS / "environment.yml").read_text())[1]
    assert set(re.findall(r"python:(\d+\.\d+)", text)) == {conda}


def test_bootstrap_takes_uv_from_the_lock_file():
    code = "import sys; sys.path.insert(0, 'envs'); import bootstrap; v, w = bootstrap.pinned_uv(); print(v); "
    code += "name = bootstrap.wheel_for_this_machine(w); print(name); print(w[name][1])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    version, name, digest = ended.stdout.split()
    assert version == locked_version("uv")
    assert name.startswith(f"uv-{version}-py3-none-")
    assert f'{name}", hash = "sha256:{digest}"' in (ROOT / "uv.lock").read_text()


def test_the_lock_file_agrees_with_pyproject():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    metadata = next(package for package in lock["package"] if package["name"] == "kairos")["metadata"]
    dependencies = {re.match(r"[\w-]+", item)[0] for item in requirements["project"]["dependencies"]}
    assert dependencies == {item["name"] for item in metadata["requires-dist"] if "marker" not in item}
    for name, items in requirements["project"]["optional-dependencies"].items():
        extra = {re.match(r"[\w-]+", item)[0] for item in items}
        locked = metadata["requires-dist"]
        assert extra == {item["name"] for item in locked if item.get("marker") == f"extra == '{name}'"}
    groups = requirements["dependency-groups"]
    items = [item for item in groups["dev"] if isinstance(item, str)] + groups["docs"]  # dev includes docs
    names = {re.match(r"[\w-]+", item)[0] for item in items}
    assert names == {item["name"] for item in metadata["requires-dev"]["dev"]}


def test_the_library_imports_only_its_dependencies_and_nothing_of_the_pipeline():
    pipeline = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"kairos-timesteps=={kairos_timesteps.__version__}" in pipeline["project"]["dependencies"]
    graph = grimp.build_graph("kairos_timesteps", include_external_packages=True, cache_dir=None)
    modules = [name for name in graph.modules if not name.startswith("kairos_timesteps.integrations.")]
    imported = {other.partition(".")[0] for name in modules for other in graph.find_modules_directly_imported_by(name)}
    assert imported - {*sys.stdlib_module_names} == {
        "kairos_timesteps",
        "numpy",
        "torch",
        "triton",
        "typing_extensions",
    }
    for name in modules:
        trainers = [other for other in graph.find_modules_directly_imported_by(name) if ".integrations" in other]
        assert trainers == [], f"{name} imports a module of a trainer"
    assert (ROOT / "library/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


# imported packages that pyproject.toml does not declare, since a declared package always installs them
INSTALLED_BY = {
    "huggingface-hub": "datasets",
    "pyarrow": "datasets",
    "pydantic-core": "pydantic",
    "snakemake-interface-common": "snakemake",
    "snakemake-interface-executor-plugins": "snakemake",
    "triton": "torch",
    "typing-extensions": "torch",
}


TRAINERS = {"lightning", "nemo_automodel", "pytorch_lightning"}  # imported by kairos_timesteps.integrations alone


def requirement_name(requirement: str) -> str:
    """Return the normalised name of the package in a requirement."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_every_package_that_the_code_imports_is_declared():
    packages = ("kairos", "kairos_timesteps", "snakemake_executor_plugin_kairos")
    graph = grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)
    external = {module for module in graph.modules if graph.is_module_squashed(module)} - set(sys.stdlib_module_names)
    external = {module for module in external if module.split(".")[0] not in TRAINERS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {requirement_name(item) for item in project["dependencies"]}
    for extra in project["optional-dependencies"].values():
        declared.update(map(requirement_name, extra))
    distributions = packages_distributions()
    for module in external:
        names = {requirement_name(name) for name in distributions[module.split(".")[0]]}
        assert names & (declared | INSTALLED_BY.keys()), f"{module} is imported, and pyproject.toml does not declare it"
    for name, declared_name in INSTALLED_BY.items():
        unconditional = [item for item in requires(declared_name) if "extra ==" not in item]
        assert declared_name in declared and name in map(requirement_name, unconditional), name


def test_the_oldest_tested_versions_are_the_lowest_that_the_library_allows():
    project = tomllib.loads((ROOT / "library/pyproject.toml").read_text())["project"]
    least = [item for items in project["optional-dependencies"].values() for item in items] + project["dependencies"]
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / ".ci/library.oldest.txt").read_text(), re.MULTILINE))
    assert dict(item.split(">=") for item in least).items() <= pinned.items()


def test_make_lists_its_targets():
    ended = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "run", "test", "test-long", "ui", "pull", "reproduce", "lint", "format", "clean"):
        assert f"make {target} " in ended.stdout
