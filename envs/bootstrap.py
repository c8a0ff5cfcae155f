"""Get the pinned uv and build the locked environment in .venv; needs nothing but this Python (3.11 or newer).

uv comes from the PATH, from pip, from the pip of a new venv, or from its wheel in the package registry. The version,
and the checksum of a download, are those in uv.lock. The settings of pip and uv (index, certificates, proxies, cache)
are respected. Only this folder and uv's cache are written.
"""

import hashlib
import html.parser
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".uv"
ENVIRONMENT = Path(os.environ.get("UV_PROJECT_ENVIRONMENT") or ROOT / ".venv")
STAMP = ENVIRONMENT / ".kairos-stamp"
PUBLIC_INDEX = "https://pypi.org/simple"
EXTRAS = ("--extra", "remotes")
CERTIFICATE_SETTINGS = {
    "UV_SYSTEM_CERTS",
    "UV_NATIVE_TLS",
}  # make uv use the system's certificates; the latter is the old name


def main():
    """Build the environment or update it; do nothing if it was built from the present lock file and projects."""
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python can run this file up to here)
        version = ".".join(str(part) for part in sys.version_info[:2])
        fail(f"this python3 is {version}; use 3.11 or newer: make PYTHON=/path/to/python3.12 ...")
    start = time.monotonic()
    os.chdir(ROOT)
    inputs = hash_inputs()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == inputs:
        return
    version, wheels = pinned_uv()
    uv = find_uv(version, wheels)
    log(f"uv {version} at {uv}")
    sync(uv)
    STAMP.write_text(inputs, encoding="utf-8")
    log(f"environment in {ENVIRONMENT} is ready after {time.monotonic() - start:.0f} s")


def hash_inputs():
    """Return a hash of the lock file and of the parts of both pyproject.toml that affect the installation."""
    import tomllib

    files = [(ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in (".", "library")]
    tables = [tomllib.loads(text) for text in files]
    projects = repr([(table["project"], table["tool"]["hatch"]) for table in tables])
    return hashlib.sha256((ROOT / "uv.lock").read_bytes() + projects.encode()).hexdigest()


def pinned_uv():
    """Return the version of uv in uv.lock, and its wheels: file name -> (URL, SHA-256)."""
    import tomllib

    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    package = next(item for item in lock["package"] if item["name"] == "uv")
    wheels = {}
    for wheel in package["wheels"]:
        wheels[wheel["url"].rsplit("/", 1)[1]] = (wheel["url"], wheel["hash"].removeprefix("sha256:"))
    return package["version"], wheels


def find_uv(version, wheels):
    """Return the path of an executable uv of the pinned version; install uv if there is none."""
    local_uv = HOME / "bin" / "uv"
    for candidate in (str(local_uv), shutil.which("uv")):
        if candidate and is_pinned_uv(candidate, version):
            return candidate
    HOME.mkdir(exist_ok=True)
    requirement = HOME / "uv.txt"
    hashes = " ".join(f"--hash=sha256:{digest}" for _, digest in wheels.values())
    requirement.write_text(f"uv=={version} {hashes}\n", encoding="utf-8")
    methods = {"pip": install_with_pip, "pip of a new venv": install_with_venv, "wheel": unpack_wheel}
    for name, method in methods.items():
        try:
            installed = method(requirement, wheels)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            log(f"uv from {name}: failed ({last_line(error)})")
            continue
        local_uv.parent.mkdir(exist_ok=True)
        shutil.copy2(installed, local_uv)
        if is_pinned_uv(str(local_uv), version):
            return str(local_uv)
    fail(
        f"uv {version} could not be installed. Set another index (PIP_INDEX_URL=https://... make ...), or "
        f"install uv {version} on the PATH."
    )


def is_pinned_uv(uv, version):
    """Return True if this is an executable uv of the pinned version."""
    try:
        process = subprocess.run([uv, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return process.returncode == 0 and process.stdout.split()[1:2] == [version]


def install_with_pip(requirement, wheels):
    """Install uv with pip into a folder, which an externally managed Python allows too; return its path."""
    install(sys.executable, requirement, "--target", str(HOME / "pip"), "--upgrade")
    return HOME / "pip" / "bin" / "uv"


def install_with_venv(requirement, wheels):
    """Install uv with the pip of a new venv, for a Python without pip; return its path."""
    run(sys.executable, "-m", "venv", "--clear", str(HOME / "venv"))
    install(str(HOME / "venv" / "bin" / "python"), requirement)
    return HOME / "venv" / "bin" / "uv"


def unpack_wheel(requirement, wheels):
    """Download uv's wheel, check its checksum and unpack it; return the path of uv."""
    name = wheel_for_this_machine(wheels)
    url, digest = wheels[name]
    data = read_wheel(name, url)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{name} does not match its checksum in uv.lock")
    archive = HOME / name
    archive.write_bytes(data)
    with zipfile.ZipFile(archive) as wheel:
        inside = next(item for item in wheel.namelist() if item.endswith(".data/scripts/uv"))
        target = HOME / "uv.unpacked"
        target.write_bytes(wheel.read(inside))
    target.chmod(0o755)
    archive.unlink()
    return target


def install(python, requirement, *options):
    """Install uv with the pip of a Python."""
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
        "--require-hashes",
        *options,
        "-r",
        requirement,
    )


def run(*command):
    """Run a command without output; raise CalledProcessError, which contains the output, if it fails."""
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def wheel_for_this_machine(wheels):
    """Return the name of uv's wheel for this system and CPU."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin":
        system, machine = "macosx", machine.replace("aarch64", "arm64")
    else:
        system = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    matches = [name for name in wheels if re.search(rf"{system}[0-9_]+{machine}\b", name)]
    if not matches:
        raise ValueError(f"uv has no wheel for {system} on {machine}")
    return matches[0]


def read_wheel(name, url):
    """Return the bytes of a wheel: from a folder of --find-links, from the configured index, or from its public URL."""
    for location in (
        os.environ.get("PIP_FIND_LINKS", "") + " " + os.environ.get("UV_FIND_LINKS", "").replace(",", " ")
    ).split():
        if (Path(location.removeprefix("file://")) / name).is_file():
            return (Path(location.removeprefix("file://")) / name).read_bytes()
    index = replaced_index()
    if index:
        page = f"{index.rstrip('/')}/uv/"
        links = Links(download(page).decode())
        url = next((urllib.parse.urljoin(page, link) for link in links.targets if name in link.split("#")[0]), None)
        if url is None:
            raise ValueError(f"{page} does not have {name}")
    return download(url)


class Links(html.parser.HTMLParser):
    """Targets of the links of an index page."""

    def __init__(self, page):
        super().__init__()
        self.targets = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        """Collect the target of a link."""
        self.targets += [value for key, value in attrs if tag == "a" and key == "href" and value]


def download(url):
    """Return the content of a URL, with the proxies and certificates of the environment."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


def replaced_index():
    """Return the package index that is configured instead of the public one; empty if there is none."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name].split("=", 1)[-1] if name == "UV_DEFAULT_INDEX" else os.environ[name]
    process = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    index = process.stdout.strip() if process.returncode == 0 else ""
    return "" if index.rstrip("/") == PUBLIC_INDEX else index


def sync(uv):
    """Build or update the locked environment."""
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)}
    environment.setdefault("UV_PYTHON_DOWNLOADS", "never")
    environment.setdefault("UV_LINK_MODE", "hardlink" if same_disk(uv, environment) else "copy")
    # compile once: images are read-only, and on a cluster hundreds of first jobs start at a time
    environment.setdefault("UV_COMPILE_BYTECODE", "1")
    environment.pop("VIRTUAL_ENV", None)
    if os.environ.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
    python, index = sys.executable, replaced_index()

    def call_uv(*arguments):
        run_uv(uv, arguments, environment)

    if not index:
        call_uv("sync", "--frozen", "--quiet", *EXTRAS, "--python", python)
        return
    # uv.lock contains URLs of the public index: on a mirror, request its versions and checksums by name
    environment["UV_DEFAULT_INDEX"] = index
    requirements = str(HOME / "requirements.txt")
    HOME.mkdir(exist_ok=True)
    call_uv("export", "--frozen", "--quiet", *EXTRAS, "--no-emit-workspace", "--output-file", requirements)
    if not (ENVIRONMENT / "bin" / "python").exists():
        call_uv("venv", "--quiet", "--python", python, str(ENVIRONMENT))
    environment["VIRTUAL_ENV"] = str(ENVIRONMENT)
    call_uv("pip", "sync", "--quiet", "--require-hashes", requirements)
    call_uv("pip", "install", "--quiet", "--no-deps", "--editable", ".", "--editable", "library")


def run_uv(uv, arguments, environment):
    """Run a command of uv; retry it with the system's certificates where uv does not trust a server.

    uv brings its own certificates, while pip uses those of the system. A proxy that replaces certificates is known to
    the system alone. `environment` keeps the setting for the commands that follow.
    """
    process = subprocess.run([uv, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    untrusted = process.returncode != 0 and "invalid peer certificate" in process.stderr
    if untrusted and not CERTIFICATE_SETTINGS & environment.keys():
        log("uv does not trust the server's certificate; trying again with the system's certificates (UV_SYSTEM_CERTS)")
        environment["UV_SYSTEM_CERTS"] = "1"
        run_uv(uv, arguments, environment)
        return
    sys.stderr.write(process.stderr)
    if untrusted:
        fail("no certificate here covers that server; set SSL_CERT_FILE=/path/to/ca.pem, the certificate of your proxy")
    if process.returncode:
        fail(f"uv {arguments[0]} failed, see above; run the same command again to continue")


def same_disk(uv, environment):
    """Return True if uv's cache is on the disk of the environment, so that its files can be hard-linked."""
    process = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, env=environment)
    location = Path(process.stdout.strip() or ".")
    while not location.exists():
        location = location.parent
    target = ROOT / ENVIRONMENT
    while not target.exists():
        target = target.parent
    return location.stat().st_dev == target.stat().st_dev


def last_line(error):
    """Return the last line of the error of a failed command or request."""
    text = getattr(error, "stderr", None) or str(error)
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def log(text):
    """Print a line for the user."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def fail(text):
    """Print a message and exit with status 1."""
    log(text)
    sys.exit(1)


if __name__ == "__main__":
    main()
