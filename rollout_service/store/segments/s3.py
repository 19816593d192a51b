"""Opens the part of a bucket that the settings name.

Credentials come from where the AWS tools have them (variables, files in ~/.aws, the role of the machine), and are never
part of the settings, of an error or of a log line. They are read again every few minutes.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollout_service.base.errors import ConfigurationError
from sandboxes.extras import extra_hint

try:
    import botocore.exceptions
    import botocore.session
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"[store] objects needs the package {error.name}, which is not installed",
        hint=f"{extra_hint('s3')}.",
    ) from error

from rollout_service.store.segments.objects import KEYS_HINT, ObjectFiles

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

KEYS_SECONDS = 600.0
"""How long credentials count as good; obstore asks for others five minutes before that."""
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0
RETRIES, RETRY_SECONDS = 3, 10.0


def open_objects(address: str, *, endpoint: str | None = None, region: str | None = None) -> ObjectFiles:
    """Return the files of `s3://BUCKET/PREFIX`; without an endpoint, that of AWS or of its variables.

    Raises:
        ConfigurationError: There are no credentials, or the address cannot be used.
    """
    parts = urlsplit(address)
    credentials = _Credentials()
    config: S3Config = {"region": region or credentials.region or "us-east-1"}
    if endpoint is not None:
        config["aws_endpoint_url_s3"] = endpoint  # before that of AWS_ENDPOINT_URL_S3
    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,
            credential_provider=credentials,
            client_options=_client_options(endpoint),
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except BaseError:
        raise ConfigurationError(
            f"the object store {address} cannot be opened", hint="Check [store] objects and objects_endpoint."
        ) from None
    return ObjectFiles(store, address)


def _client_options(endpoint: str | None) -> ClientConfig:
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=ANSWER_SECONDS),
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
    }
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"AWS_CA_BUNDLE cannot be read: {error}", hint="Name a file with certificates."
            ) from None
    return options


class _Credentials:
    """Finds credentials as the AWS tools do, whenever obstore asks for them."""

    def __init__(self) -> None:
        logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells of each time that it finds them
        try:
            self()
            self.region: str | None = botocore.session.Session().get_config_variable("region")
        except (botocore.exceptions.BotoCoreError, PermissionError) as error:
            raise ConfigurationError(
                f"there are no credentials for [store] objects ({type(error).__name__})", hint=KEYS_HINT
            ) from None

    def __call__(self) -> S3Credential:
        found = botocore.session.Session().get_credentials()  # anew, since files in ~/.aws may have changed
        if found is None:
            raise botocore.exceptions.NoCredentialsError
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=KEYS_SECONDS),
        }
