"""Users as salted hashes.

Guarantees: the salt never leaves the node's state folder, and only its owner can read it. Users of two tenants are two
users, whatever their names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import write_private

_SALT_BYTES = 32
_HASH_BYTES = 16
DEFAULT_TENANT = "default"


class UserHashes:
    """The hashes of the users of one node."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    @classmethod
    def load(cls, path: Path) -> UserHashes:
        """Read the salt of a file, or write a new one.

        Raises:
            ConfigurationError: The file cannot be read or written.
        """
        try:
            if not path.exists():
                write_private(path, secrets.token_bytes(_SALT_BYTES))
            salt = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"the salt of user names in {path} cannot be used: {error}") from error
        if len(salt) != _SALT_BYTES:
            raise ConfigurationError(
                f"{path} does not hold {_SALT_BYTES} bytes",
                hint="Restore it, or remove it; users of before are then others.",
            )
        return cls(salt)

    def message_key(self) -> bytes:
        """Return a key for hashes of users' messages."""
        return hashlib.blake2b(digest_size=_SALT_BYTES, key=self._salt, person=b"messages").digest()

    def of_conversation(self, session_id: str, client: str) -> str:
        """Return the hash of a session's conversation, which goes on in all sessions of a client's own id."""
        return self._digest(b"conversation", client or session_id)

    def hash(self, user: str, tenant: str) -> str:
        """Return the hash of a user of a tenant, by name."""
        return self._digest(b"user", json.dumps([tenant, user]))

    def of_session(self, session_id: str) -> str:
        """Return the hash that stands for the unknown user of a session."""
        return self._digest(b"session", session_id)

    def of_client(self, tenant: str, key_name: str, client_id: str) -> str:
        """Return the hash of a client's own id: no other key's and no other tenant's."""
        return self._digest(b"client", json.dumps([tenant, key_name, client_id]))

    def _digest(self, kind: bytes, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._salt, person=kind).hexdigest()
