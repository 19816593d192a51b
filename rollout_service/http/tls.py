"""The API's TLS certificate, which is checked before the server starts and reloaded when it is renewed.

Guarantees: a certificate that cannot be used is a `ConfigurationError` at the start; later it changes nothing, and the
log says why. Connections keep the certificate that they were opened with.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from rollout_service.base.errors import ConfigurationError

log = structlog.get_logger(__name__)

POLL_SECONDS = 10.0


class Certificate:
    """A certificate with its chain and key."""

    def __init__(self, certificate: Path, key: Path | None, password: str | None) -> None:
        """Check that the files can be used.

        Raises:
            ConfigurationError: The files cannot be used.
        """
        self._certificate = certificate.expanduser()
        self._key = key.expanduser() if key is not None else None
        self._password = password
        self._version = self._file_versions()
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def options(self) -> dict[str, Any]:
        """Return the certificate as uvicorn's options."""
        return {
            "ssl_certfile": self._certificate,
            "ssl_keyfile": self._key,
            "ssl_keyfile_password": self._password,
        }

    async def follow(self, context: ssl.SSLContext) -> None:
        """Use a renewed certificate for new connections, until cancelled."""
        while True:
            await anyio.sleep(POLL_SECONDS)
            version = await anyio.to_thread.run_sync(self._file_versions)
            if version == self._version:
                continue
            self._version = version
            try:
                self._load(
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                )  # a failure leaves a context without a key
                self._load(context)
            except ConfigurationError as error:
                log.error("new certificate is invalid; keeping the previous one", error=str(error))
            else:
                log.info("certificate reloaded", file=str(self._certificate))

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password=self._password or "")
        except OSError as error:  # SSLError is one
            files = f"{self._certificate} and {self._key}" if self._key else str(self._certificate)
            why = getattr(error, "reason", None) or error.strerror or str(error)
            raise ConfigurationError(
                f"cannot use {files} for TLS: {why}",
                hint="Set `tls_certificate` to a PEM file with the chain, and `tls_key` to one with its private key.",
            ) from None

    def _file_versions(self) -> list[tuple[int, int] | None]:
        """Return a value that changes whenever one of the files does."""
        return [_file_version(path) for path in (self._certificate, self._key) if path is not None]


def _file_version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
