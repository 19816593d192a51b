"""A real SeaweedFS, which speaks S3's API, as a process of a test: started, stopped, killed and paused.

What was stored is there again after a restart. The buckets and their contents are read and changed past the service by
the AWS client.
"""

import json
import os
import signal
import socket
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.session
import psutil
from botocore.config import Config

from tests.support.processes.server_process import ServerProcess, in_own_folder

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / ".cache" / "seaweedfs" / "bin" / "weed"
START_SECONDS = 60.0
BUCKET = "trajectories"
OPERATOR, SERVICE, READER, STRANGER = ("operator", "service", "reader", "stranger")
ACTIONS = {
    OPERATOR: ["Admin"],
    SERVICE: [f"{action}:{BUCKET}" for action in ("Read", "Write", "List")],
    READER: [f"{action}:{BUCKET}" for action in ("Read", "List")],
}
PARTS = ("master.port", "volume.port", "filer.port", "s3.port")
_numbers = count(1)


def keys(user: str) -> dict[str, str]:
    """Return the variables with the keys of a user."""
    return {"AWS_ACCESS_KEY_ID": f"key-of-{user}", "AWS_SECRET_ACCESS_KEY": f"secret-of-{user}"}


@dataclass
class ObjectServer(ServerProcess):
    """A server in a folder of its own."""

    end_seconds = START_SECONDS

    folder: Path
    host: str = "127.0.0.1"
    actions: dict[str, list[str]] = field(default_factory=lambda: dict(ACTIONS))
    """The actions that each user is allowed; a change takes effect with the next start."""
    process: psutil.Popen | None = None
    ports: list[int] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports[-1]}"

    @property
    def log(self) -> str:
        return (self.folder / "weed.log").read_text()

    def address(self, bucket: str = BUCKET) -> str:
        """Return a prefix that no other test uses."""
        return f"s3://{bucket}/t{os.getpid()}/{next(_numbers)}"

    def settings(self, address: str) -> str:
        """Return the lines of `[store]` for a prefix."""
        return f'objects = "{address}"\nobjects_endpoint = "{self.endpoint}"\n'

    def client(self, user: str = OPERATOR) -> Any:
        """Return the AWS client; close it."""
        given = keys(user)
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=given["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
            config=Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 0}),
        )

    def objects(self, address: str) -> dict[str, int]:
        """Return the sizes of the objects below a prefix, by their names."""
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        found = (one for page in pages for one in page.get("Contents", ()))
        return {one["Key"].removeprefix(f"{prefix}/"): one["Size"] for one in found}

    def put(self, address: str, name: str, data: bytes) -> None:
        """Write an object past the service."""
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        self.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)

    def delete(self, address: str, *names: str) -> None:
        """Delete objects past the service."""
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        for name in names:
            self.client().delete_object(Bucket=bucket, Key=f"{prefix}/{name}")

    def start(self) -> None:
        """Start it, and create the bucket if there is none."""
        self.prepare()
        # It would take keys in its variables for those of an administrator.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self.folder / "weed.log").open("ab") as log:
            self.process = psutil.Popen(self.command(), stdout=log, stderr=log, cwd=self.folder, env=environment)
        self.wait_until_ready()

    def prepare(self) -> None:
        """Write what `command` needs."""
        self.ports = self.ports or unused_ports(self.host, 2 * len(PARTS))
        users = [
            {
                "name": user,
                "credentials": [{"accessKey": f"key-of-{user}", "secretKey": f"secret-of-{user}"}],
                "actions": actions,
            }
            for user, actions in self.actions.items()
        ]
        (self.folder / "users.json").write_text(json.dumps({"identities": users}))
        (self.folder / "data").mkdir(exist_ok=True)

    def command(self) -> list[str]:
        """Return the program with its arguments."""
        flags: dict[str, Any] = dict(zip(PARTS, self.ports[len(PARTS) :], strict=True))
        flags |= {f"{part}.grpc": port for part, port in zip(PARTS, self.ports, strict=False)}
        flags |= {"ip": self.host, "ip.bind": self.host, "dir": self.folder / "data"}
        flags |= {"s3.config": self.folder / "users.json", "s3.port.iceberg": 0, "s3.port.lance": 0}
        flags |= {"s3.localSocket": self.folder / "s3.sock", "filer.localSocket": self.folder / "filer.sock"}
        flags |= {"volume.max": 50, "master.volumeSizeLimitMB": 64, "master.telemetry": "false"}
        flags |= {"s3.iam": "false", "s3.autoCreateBucket": "false", "master.electionTimeout": "100ms"}
        return [str(PROGRAM), "-logtostderr=true", "server", "-s3", "-filer"] + [
            f"-{name}={value}" for name, value in flags.items()
        ]

    def wait_until_ready(self) -> None:
        """Wait until the bucket can be written."""
        end = time.monotonic() + START_SECONDS
        while True:
            assert self.process is None or self.process.poll() is None, self.log
            try:
                client = self.client()
                with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="started", Body=b"")
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                assert time.monotonic() < end, self.log
                time.sleep(0.1)
            else:
                return

    def stop(self, number: int = signal.SIGTERM) -> None:
        super().stop(number)
        self.remove_sockets()

    def remove_sockets(self) -> None:
        """Remove what it leaves beside its folder."""
        for port in self.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()


def unused_ports(host: str, number: int) -> list[int]:
    """Return ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def object_server(**options: Any) -> AbstractContextManager[ObjectServer]:
    """Run a server for the block."""
    return in_own_folder(lambda folder: ObjectServer(folder, **options), "objects-")
