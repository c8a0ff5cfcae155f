"""Bring the pinned uv and build the locked environment in .venv; needs nothing but this Python (3.11 or newer).

uv comes from where it can be had: the PATH, pip, pip of a fresh venv, or its wheel straight from the package registry.
All are held to the version and, where anything is downloaded, to the checksums in uv.lock. The settings of pip and uv
(index, certificates, proxies, cache) are respected; nothing outside this folder and uv's cache is written.
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
CERTIFICATE_SETTINGS = {"UV_SYSTEM_CERTS", "UV_NATIVE_TLS"}  # whether uv uses the system's; the latter is the old name


def main():
    """Build the environment, or bring it up to date; nothing to do where it is what the lock file says."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file is what an older Python is told by)
        version = ".".join(str(part) for part in sys.version_info[:2])
        fail(f"this python3 is {version}, and 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.12 ...")
    begun = time.monotonic()
    os.chdir(ROOT)
    wanted = what_it_is_built_from()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    version, wheels = pinned_uv()
    uv = find_uv(version, wheels)
    say(f"uv {version} at {uv}")
    sync(uv)
    STAMP.write_text(wanted, encoding="utf-8")
    say(f"environment in {ENVIRONMENT} is ready, took {time.monotonic() - begun:.0f} s")


def what_it_is_built_from():
    """Hash of the lock file and of what this project installs."""
    import tomllib

    files = [(ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in (".", "library")]
    tables = [tomllib.loads(text) for text in files]
    projects = repr([(table["project"], table["tool"]["hatch"]) for table in tables])
    return hashlib.sha256((ROOT / "uv.lock").read_bytes() + projects.encode()).hexdigest()


def pinned_uv():
    """Version of uv in uv.lock, and its wheels: file name -> (URL, SHA-256)."""
    import tomllib

    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    package = next(item for item in lock["package"] if item["name"] == "uv")
    wheels = {}
    for wheel in package["wheels"]:
        wheels[wheel["url"].rsplit("/", 1)[1]] = (wheel["url"], wheel["hash"].removeprefix("sha256:"))
    return package["version"], wheels


def find_uv(version, wheels):
    """An executable uv of the pinned version, fetched where none is here."""
    own = HOME / "bin" / "uv"
    for candidate in (str(own), shutil.which("uv")):
        if candidate and runs(candidate, version):
            return candidate
    HOME.mkdir(exist_ok=True)
    requirement = HOME / "uv.txt"
    hashes = " ".join(f"--hash=sha256:{digest}" for _, digest in wheels.values())
    requirement.write_text(f"uv=={version} {hashes}\n", encoding="utf-8")
    for way in (with_pip, with_venv, with_wheel):
        try:
            found = way(requirement, wheels)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            say(f"{way.__doc__.split(':')[0]}: no ({reason(error)})")
            continue
        own.parent.mkdir(exist_ok=True)
        shutil.copy2(found, own)
        if runs(str(own), version):
            return str(own)
    fail(
        f"uv {version} could not be fetched in any way. With another index: PIP_INDEX_URL=https://... make ...; or "
        f"install uv {version} yourself so that it is on the PATH."
    )


def runs(uv, version):
    """Return True if this is an executable uv of the pinned version."""
    try:
        done = subprocess.run([uv, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.split()[1:2] == [version]


def with_pip(requirement, wheels):
    """Pip: into a folder of our own, which an externally managed Python allows too."""
    install(sys.executable, requirement, "--target", str(HOME / "pip"), "--upgrade")
    return HOME / "pip" / "bin" / "uv"


def with_venv(requirement, wheels):
    """Pip of a fresh venv: where this Python has none."""
    run(sys.executable, "-m", "venv", "--clear", str(HOME / "venv"))
    install(str(HOME / "venv" / "bin" / "python"), requirement)
    return HOME / "venv" / "bin" / "uv"


def with_wheel(requirement, wheels):
    """The wheel itself: fetched from the registry, checked, unpacked."""
    name = wheel_for_this_machine(wheels)
    url, digest = wheels[name]
    data = fetch(name, url)
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
    """Install uv with some Python's pip."""
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
    """Run a command quietly; its output matters where it fails."""
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def wheel_for_this_machine(wheels):
    """Name of uv's wheel for this system and processor."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin":
        system, machine = "macosx", machine.replace("aarch64", "arm64")
    else:
        system = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    found = [name for name in wheels if re.search(rf"{system}[0-9_]+{machine}\b", name)]
    if not found:
        raise ValueError(f"uv has no wheel for {system} on {machine}")
    return found[0]


def fetch(name, url):
    """A wheel's bytes: from a folder of --find-links, from the index that is set, or from its public URL."""
    for place in (
        os.environ.get("PIP_FIND_LINKS", "") + " " + os.environ.get("UV_FIND_LINKS", "").replace(",", " ")
    ).split():
        if (Path(place.removeprefix("file://")) / name).is_file():
            return (Path(place.removeprefix("file://")) / name).read_bytes()
    index = replaced_index()
    if index:
        page = f"{index.rstrip('/')}/uv/"
        links = Links(read(page).decode())
        url = next((urllib.parse.urljoin(page, link) for link in links.found if name in link.split("#")[0]), None)
        if url is None:
            raise ValueError(f"{page} does not have {name}")
    return read(url)


class Links(html.parser.HTMLParser):
    """The links of an index page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        """Collect the target of a link."""
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]


def read(url):
    """Content of a URL; proxies and certificates as the environment says."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


def replaced_index():
    """The package index that is set instead of the public one, if any."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name].split("=", 1)[-1] if name == "UV_DEFAULT_INDEX" else os.environ[name]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    found = done.stdout.strip() if done.returncode == 0 else ""
    return "" if found.rstrip("/") == PUBLIC_INDEX else found


def sync(uv):
    """Build or update the locked environment."""
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)}
    environment.setdefault("UV_PYTHON_DOWNLOADS", "never")
    environment.setdefault("UV_LINK_MODE", "hardlink" if same_disk(uv, environment) else "copy")
    # once, for all the processes to come; images are read only, and on a cluster hundreds of first jobs start at once
    environment.setdefault("UV_COMPILE_BYTECODE", "1")
    environment.pop("VIRTUAL_ENV", None)
    if os.environ.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
    python, index = sys.executable, replaced_index()

    def call(*arguments):
        run_uv(uv, arguments, environment)

    if not index:
        call("sync", "--frozen", "--quiet", *EXTRAS, "--python", python)
        return
    # uv.lock names files of the public index: on a mirror the same versions and checksums are asked for by name
    environment["UV_DEFAULT_INDEX"] = index
    requirements = str(HOME / "requirements.txt")
    HOME.mkdir(exist_ok=True)
    call("export", "--frozen", "--quiet", *EXTRAS, "--no-emit-workspace", "--output-file", requirements)
    if not (ENVIRONMENT / "bin" / "python").exists():
        call("venv", "--quiet", "--python", python, str(ENVIRONMENT))
    environment["VIRTUAL_ENV"] = str(ENVIRONMENT)
    call("pip", "sync", "--quiet", "--require-hashes", requirements)
    call("pip", "install", "--quiet", "--no-deps", "--editable", ".", "--editable", "library")


def run_uv(uv, arguments, environment):
    """Run a command of uv; retry it with the system's certificates where uv does not trust a server.

    uv brings its own certificates, while pip uses those of the system. A proxy that replaces certificates is known to
    the system alone. `environment` keeps the setting for the commands that follow.
    """
    done = subprocess.run([uv, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    untrusted = done.returncode != 0 and "invalid peer certificate" in done.stderr
    if untrusted and not CERTIFICATE_SETTINGS & environment.keys():
        say("uv does not trust the server's certificate; trying again with the system's certificates (UV_SYSTEM_CERTS)")
        environment["UV_SYSTEM_CERTS"] = "1"
        run_uv(uv, arguments, environment)
        return
    sys.stderr.write(done.stderr)
    if untrusted:
        fail("no certificate here vouches for that server; set SSL_CERT_FILE=/path/to/ca.pem, your proxy's certificate")
    if done.returncode:
        fail(f"uv {arguments[0]} failed, see above; the same command goes on from there")


def same_disk(uv, environment):
    """Return True if uv's cache is on the disk of the environment, so that its files can be hard-linked."""
    done = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, env=environment)
    place = Path(done.stdout.strip() or ".")
    while not place.exists():
        place = place.parent
    target = ROOT / ENVIRONMENT
    while not target.exists():
        target = target.parent
    return place.stat().st_dev == target.stat().st_dev


def reason(error):
    """The last line of what a failed command or request said."""
    text = getattr(error, "stderr", None) or str(error)
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def say(text):
    """A line for the user."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def fail(text):
    """End with one message."""
    say(text)
    sys.exit(1)


if __name__ == "__main__":
    main()
