"""The unit of deploy/systemd, started by systemd."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kvferry import TlsConfig
from tests.deployed.debian import read, run, until
from tests.deployed.system import System
from tests.support.certificates import Authority

READ = "READ all right\n"


def test_unit_starts_with_the_rights_of_its_file_and_its_group_may_connect(system: System) -> None:
    system.boot()
    assert system.show("ActiveState") == "active", system.journal()
    assert system.show("Type") == "notify"
    assert system.show("StatusText").startswith("listens on unix:/run/kvferry/node.sock and 127.0.0.1:7423")
    assert system.show("MemoryMax") == str(2 << 30)
    status = system.execute("cat", f"/proc/{system.pid}/status").stdout
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (values["NoNewPrivs"], values["Seccomp"], int(values["CapEff"], 16)) == ("1", "2", 0)
    modes = system.execute("stat", "--format", "%a %U %G", "/run/kvferry", "/run/kvferry/node.sock").stdout
    assert modes == "750 kvferry kvferry\n660 kvferry kvferry\n"
    assert system.health("kvferry", "kvferry").stdout == "SERVING\n"
    refused = system.health("nobody", "nogroup")
    assert refused.returncode != 0
    assert "ermission denied" in refused.stderr
    assert read(system.runtime) == READ


def test_unit_that_is_killed_starts_again_and_one_that_is_stopped_does_not(system: System) -> None:
    system.boot()
    system.execute("kill", "-KILL", system.pid)
    system.until("NRestarts", "1")
    system.until("ActiveState", "active")
    assert "which a killed server left" in system.journal()
    assert read(system.runtime) == READ
    assert system.execute("systemctl", "stop", "kvferryd").returncode == 0
    assert (system.show("ActiveState"), system.show("ExecMainStatus")) == ("inactive", "0")
    assert system.execute("test", "-d", "/run/kvferry").returncode == 0


def test_unit_waits_for_a_key_that_its_group_can_read_and_reloads_the_certificate(
    system: System, tmp_path: Path
) -> None:
    authority = Authority.make(tmp_path, "ca")
    settings = system.settings / "kvferryd.toml"
    files = 'tls_cert = "/etc/kvferry/node.pem"\ntls_key = "/etc/kvferry/node.key"\n'
    settings.write_text(settings.read_text() + files)
    install(system, authority.issue("first"))
    system.boot()
    assert system.show("ActiveState") == "failed"
    assert (system.show("ExecMainStatus"), system.show("NRestarts")) == ("2", "0")
    assert "/etc/kvferry/node.key" in system.journal()
    allow(system)
    assert system.execute("systemctl", "start", "kvferryd").returncode == 0, system.journal()
    first, pid = certificate(system), system.pid
    install(system, authority.issue("second"))
    allow(system)
    assert certificate(system) == first
    assert system.execute("systemctl", "reload", "kvferryd").returncode == 0, system.journal()
    # systemd 252 does not wait for the answer to the signal.
    until(lambda: certificate(system) != first, system.journal)
    assert (system.show("ActiveState"), system.pid) == ("active", pid)


def install(system: System, issued: TlsConfig) -> None:
    """Install a certificate and its key, which only root may read."""
    for name, file in (("node.pem", issued.cert), ("node.key", issued.key)):
        assert file is not None
        (system.settings / name).unlink(missing_ok=True)
        shutil.copy(file, system.settings / name)
    (system.settings / "node.pem").chmod(0o644)
    (system.settings / "node.key").chmod(0o600)


def allow(system: System) -> None:
    """Give the key to kvferryd, as docs/deployment.md says."""
    system.execute("chown", "kvferry", "/etc/kvferry/node.key")
    system.execute("chmod", "400", "/etc/kvferry/node.key")


def certificate(system: System) -> str:
    """The fingerprint of the certificate that kvferryd shows."""
    shown = system.execute("openssl", "s_client", "-connect", "127.0.0.1:7423", "-alpn", "h2").stdout
    found = re.search(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", shown, re.DOTALL)
    assert found is not None, shown
    return run("openssl", "x509", "-noout", "-fingerprint", input=found[0])
