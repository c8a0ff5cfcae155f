"""Set-up of the locked environment from a package index whose certificate comes from an unknown authority."""

import datetime
import http.server
import ipaddress
import os
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography, which makes the certificates, is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
SYSTEM_STORE = Path("/etc/ssl/certs/ca-certificates.crt")

# Builds the environment of the project in the current folder with the uv of the second argument.
SYNC = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import bootstrap
bootstrap.ROOT = Path.cwd()
bootstrap.HOME = bootstrap.ROOT / ".uv"
bootstrap.ENVIRONMENT = bootstrap.ROOT / ".venv"
bootstrap.sync(sys.argv[2])
"""


def common_name(text):
    """Return a common name for the subject or issuer of a certificate."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def certificate(subject, key, issuer_key, is_authority):
    """Return a certificate of localhost or of the authority that is valid for a day."""
    now = datetime.datetime.now(datetime.UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder(
        common_name("test CA"), common_name(subject), key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def wheel(path):
    """Write the wheel of a package with one empty module."""
    information = "tinypkg-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinypkg.py", "")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "tinypkg.py,,\n")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a log."""

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """The file with the certificate of the authority, and the URL of a package index that the authority has signed."""
    folder = tmp_path_factory.mktemp("index")
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority_file = folder / "authority.pem"
    server_file = folder / "server.pem"
    authority_file.write_bytes(certificate("test CA", authority_key, authority_key, True))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server_file.write_bytes(certificate("localhost", key, authority_key, False) + private)

    pages = folder / "pages"
    package = pages / "simple" / "tinypkg"
    package.mkdir(parents=True)
    wheel(package / "tinypkg-1.0-py3-none-any.whl")
    (package / "index.html").write_text('<a href="tinypkg-1.0-py3-none-any.whl">tinypkg-1.0-py3-none-any.whl</a>')

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_file)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=pages)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield authority_file, f"https://localhost:{server.server_port}/simple"
        server.shutdown()


@pytest.fixture
def project(authority, tmp_path):
    """A project whose lock file contains a package of that index."""
    authority_file, index = authority
    extras = "[project.optional-dependencies]\nremotes = []\n"
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "1.0"\nrequires-python = ">=3.11"\ndependencies = ["tinypkg"]\n'
        f'{extras}[tool.uv]\npackage = false\n[[tool.uv.index]]\nurl = "{index}"\ndefault = true\n'
    )
    environment = clean_environment(SSL_CERT_FILE=str(authority_file))
    lock = [UV, "lock", "--quiet", "--no-cache", "--python", sys.executable]
    subprocess.run(lock, cwd=tmp_path, env=environment, check=True)
    return tmp_path


def clean_environment(**variables):
    """Return the environment without this machine's settings of indexes and certificates."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "SSL_CERT_")) and "proxy" not in name.lower()
    }
    return environment | {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CACHE": "1", "XDG_CONFIG_HOME": os.devnull} | variables


def set_up(project, before=(), **variables):
    """Set up the environment of a project; returns the ended process and the installed modules."""
    command = [*before, sys.executable, "-c", SYNC, str(ROOT / "envs"), str(UV)]
    ended = subprocess.run(command, cwd=project, env=clean_environment(**variables), capture_output=True, text=True)
    return ended, list(project.glob(".venv/lib/*/site-packages/tinypkg.py"))


def test_an_authority_in_the_environment_is_used_at_once(project, authority):
    ended, installed = set_up(project, SSL_CERT_FILE=str(authority[0]))
    assert ended.returncode == 0 and installed, ended.stderr
    assert ended.stderr == ""


def test_an_authority_of_the_system_is_used_after_a_failed_attempt(project, authority):
    """The system's store is replaced in a mount namespace of this process alone."""
    if not (shutil.which("unshare") and SYSTEM_STORE.exists()):
        pytest.skip(f"no unshare, or no {SYSTEM_STORE} here")
    replace = f'mount --bind "{authority[0]}" {SYSTEM_STORE} && exec "$@"'
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c", replace, "sh"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces for this user")
    ended, installed = set_up(project, namespace)
    assert ended.returncode == 0 and installed, ended.stderr
    assert ended.stderr.count("\n") == 1 and "UV_SYSTEM_CERTS" in ended.stderr


def test_an_unknown_authority_fails_and_the_message_contains_the_variable_to_set(project):
    ended, installed = set_up(project)
    assert ended.returncode == 1 and not installed
    last = ended.stderr.splitlines()[-1]
    assert "SSL_CERT_FILE" in last


def test_a_setting_of_the_user_is_kept(project):
    ended, installed = set_up(project, UV_SYSTEM_CERTS="false")
    assert ended.returncode == 1 and not installed
    assert "trying again" not in ended.stderr


def test_other_failures_of_uv_are_shown(project):
    (project / "uv.lock").write_text("no lock file")
    ended, _ = set_up(project)
    assert ended.returncode == 1 and "uv.lock" in ended.stderr and "SSL_CERT_FILE" not in ended.stderr
