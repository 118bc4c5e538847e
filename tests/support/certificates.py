"""Certificates, made by openssl, and the flags that name them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry._wire.channel import TlsConfig


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    name: str

    @classmethod
    def make(cls, folder: Path, name: str, days: int = 2, subject: str = "") -> Authority:
        """An authority that is valid for this many days. Its common name is its name unless given as `subject`."""
        authority = cls(folder, name)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", f"{days}", "-subj", f"/CN={subject or name}"),
            *("-keyout", f"{folder / name}.key", "-out", f"{authority.certificate}"),
        )
        return authority

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def issue(
        self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", subject: str = "", days: int = 2, usages: str = ""
    ) -> TlsConfig:
        """A certificate, for this host unless it has other `names`, and the authority to check others with. Its
        subject is its common name unless given. With -1 `days` it has expired. `usages`: a line of extensions."""
        key, cert, request = (self.folder / f"{self.name}-{name}.{ending}" for ending in ("key", "pem", "csr"))
        extensions = self.folder / f"{self.name}-{name}.ext"
        extensions.write_text((f"subjectAltName={names}\n" if names else "") + f"{usages}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", subject or f"/CN={name}", "-keyout", f"{key}", "-out", f"{request}"),
        )
        _openssl(
            *(
                "x509",
                "-req",
                "-in",
                f"{request}",
                "-CA",
                f"{self.certificate}",
                "-CAkey",
                f"{self.folder / self.name}.key",
            ),
            *("-set_serial", "1", "-days", f"{days}", "-extfile", f"{extensions}", "-out", f"{cert}"),
        )
        return TlsConfig(ca=self.certificate, cert=cert, key=key)


def replace_files(new: TlsConfig, at: TlsConfig) -> TlsConfig:
    """Put the contents of `new` at the paths of `at`, each whole, as tools do that renew certificates. Returns `at`."""
    for source, path in ((new.ca, at.ca), (new.cert, at.cert), (new.key, at.key)):
        if source is not None and path is not None:
            whole = path.with_name(path.name + ".new")
            whole.write_bytes(source.read_bytes())
            whole.rename(path)
    return at


def tls_flags(tls: TlsConfig) -> Sequence[str]:
    """The flags of a server or of the command line for these files."""
    files = (("--tls-ca", tls.ca), ("--tls-cert", tls.cert), ("--tls-key", tls.key))
    return [part for flag, path in files if path is not None for part in (flag, str(path))]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
