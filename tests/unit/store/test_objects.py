"""Segment files as objects: whole or not there, overwritten by nobody else, and errors that say only what they may."""

import logging
import sys
from pathlib import Path

import anyio
import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore
from pydantic import ValidationError

from rollout_service.base.errors import ConfigurationError, RecordLostError, StoreError
from rollout_service.settings import StoreSettings
from rollout_service.store.segments import objects
from rollout_service.store.segments.files import files_of
from rollout_service.store.segments.ledger import SegmentReference
from rollout_service.store.segments.objects import ObjectFiles, RequestFailedError, explained
from rollout_service.store.segments.s3 import open_objects
from tests.support.store.segments import MemoryLedger, keep, opened, read, segment_files

ADDRESS = "s3://bucket/prefix"
SECRET = "AKIA-never-shown"


@pytest.fixture
def files() -> ObjectFiles:
    return ObjectFiles(MemoryStore(), ADDRESS, write_seconds=0)


async def test_each_write_is_an_object_that_goes_once_nothing_refers_to_it(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        one, two = await keep(segments, ledger, b"a", b"b")
        (three,) = await keep(segments, ledger, b"c")
        assert not ledger.owners, "each is closed at once"
        assert len(segment_files(files)) == 2
        ledger.drop(one)
        assert await segments.collect() == 0
        ledger.drop(two)
        assert await segments.collect() == 1
        assert segment_files(files) == {SegmentReference.parse(three).file}


async def test_records_that_come_soon_after_each_other_share_an_object(monkeypatch):
    ledger, files = MemoryLedger(), ObjectFiles(MemoryStore(), ADDRESS, write_seconds=0.3)
    async with await opened(files, ledger) as segments, anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(keep, segments, ledger, b"%d" % number)
            await anyio.sleep(0.005)
    assert 2 <= len(segment_files(files)) <= 3


async def test_many_are_read_at_once_and_the_lost_one_is_named(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        references = {str(number): (await keep(segments, ledger, b"%d" % number))[0] for number in range(100)}
        files.delete(SegmentReference.parse(references["70"]).file)
        found = await segments.read_all(references)
        assert isinstance(found.pop(70), RecordLostError)
        assert found == [b"%d" % number for number in range(100) if number != 70]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-1] + b"?", lambda data: b""])
async def test_a_damaged_object_is_a_lost_record(files, change):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        (reference,) = await keep(segments, ledger, b"record")
        name = SegmentReference.parse(reference).file
        files.store(name, change(files.read(name, 0, 1_000)))
        with pytest.raises(RecordLostError, match="the rollout r1"):
            await read(segments, reference, "the rollout r1")


async def test_an_object_that_was_written_too_late_is_deleted_by_its_writer(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        async with segments.keep([b"late"]) as (reference,):
            name = SegmentReference.parse(reference).file
            await ledger.seal([name])  # it was taken for dead, and its file deleted before it was there
            await ledger.forget([name])
            assert not ledger.add(reference)
            await segments.abandon(reference)
        assert not segment_files(files)


async def test_a_bucket_that_was_emptied_takes_no_record(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        (reference,) = await keep(segments, ledger, b"record")
        files.delete(*files.sizes())
        with pytest.raises(StoreError, match="has no mark"):
            await keep(segments, ledger, b"record")
        with pytest.raises(StoreError, match="has no mark"):
            await read(segments, reference, "r1")


def test_overwriting_loses_no_other_overwriting(files, monkeypatch):
    files.store("a", b"0123456789")
    put, once = obstore.put, [True]

    def interrupted(store, name, data, **given):
        if once and "mode" in given:
            once.clear()
            files.overwrite("a", 0, 2)
        return put(store, name, data, **given)

    monkeypatch.setattr(objects.obstore, "put", interrupted)
    files.overwrite("a", 8, 2)
    assert files.read("a", 0, 100) == bytes(2) + b"234567" + bytes(2)


def test_what_is_gone_is_not_overwritten(files):
    with pytest.raises(FileNotFoundError):
        files.overwrite("a", 0, 1)
    assert not files.has("a")
    files.store("a", b"12")
    files.overwrite("a", 1, 100)
    assert files.read("a", 0, 100) == b"1\0"
    assert files.read("a", 2, 1) == b""


def test_a_server_that_ignores_conditions_is_refused(files, monkeypatch):
    put = obstore.put
    monkeypatch.setattr(objects.obstore, "put", lambda store, name, data, **_: put(store, name, data))
    with pytest.raises(RequestFailedError) as caught:
        files.store_once("mark", b"1")
    assert "If-None-Match" in files.failed(caught.value).hint
    assert not files.sizes()


ANSWER = f"status code: 403 Forbidden: <Error><Code>%s</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"


@pytest.mark.parametrize(
    ("error", "why", "hint"),
    [
        (PermissionDeniedError(ANSWER % "AccessDenied"), "access is denied", "s3:PutObject"),
        (PermissionDeniedError(ANSWER % "SignatureDoesNotMatch"), "refuses the credentials", "AWS_PROFILE"),
        (UnauthenticatedError(f"External provider: {SECRET}"), "no credentials", "AWS_PROFILE"),
        (FileNotFoundError(ANSWER % "NoSuchBucket"), "bucket does not exist", "Create the bucket"),
        (GenericError(f"failed for key {SECRET}: Denied (code: AccessDenied)"), "denied", "s3:DeleteObject"),
        (GenericError("status code: 503 Slow: <Code>SlowDown</Code>"), "too busy", "goes on by itself"),
        (GenericError("status code: 301 Moved: "), "another region", "objects_region"),
        (GenericError("status code: 507 Full: "), "is full", "Free space"),
        (
            GenericError("HTTP error: error sending request (Connect)"),
            "cannot be reached",
            "objects_endpoint",
        ),
        (GenericError("HTTP error: operation timed out"), "in time", "objects_endpoint"),
        (
            GenericError(f"status code: 418 Teapot: {SECRET}"),
            "a request failed \\(418\\)",
            "log of its server",
        ),
    ],
)
def test_a_failure_says_what_to_do_and_nothing_that_the_server_said(files, error, why, hint):
    with pytest.raises(RequestFailedError, match=why) as caught, explained():
        raise error
    failed = files.failed(caught.value)
    assert ADDRESS in str(failed)
    assert hint in failed.hint
    assert SECRET not in f"{failed} {failed.hint} {caught.value}"
    assert caught.value.__suppress_context__, "nor does a traceback"


# The settings.


@pytest.fixture
def no_keys(monkeypatch, tmp_path):
    """Leave nothing where the AWS tools look for credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize(
    "given",
    [
        {"objects": "http://bucket"},
        {"objects": "s3://"},
        {"objects": "s3://bucket/a?versionId=1"},
        {"objects": ADDRESS, "folder": "/shared"},
        {"objects": ADDRESS, "objects_endpoint": f"https://{SECRET}@host"},
        {"objects": ADDRESS, "objects_endpoint": "host:9000"},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given):
    with pytest.raises(ValidationError):
        StoreSettings.model_validate(given)


def test_without_credentials_nothing_is_opened(no_keys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET)
    with pytest.raises(ConfigurationError, match="no credentials") as caught:
        files_of(StoreSettings(objects=ADDRESS))
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
    assert SECRET not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigurationError, match="no credentials"):
        files_of(StoreSettings(objects=ADDRESS))


def test_credentials_come_from_a_profile_and_are_shown_nowhere(no_keys, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    keys = f"aws_access_key_id = {SECRET}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(f"[training]\n{keys}")
    monkeypatch.setenv("AWS_PROFILE", "training")
    files = open_objects(ADDRESS)
    assert files.texts.where == ADDRESS
    assert SECRET not in repr(vars(files)) + caplog.text


def test_without_its_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.delitem(sys.modules, "rollout_service.store.segments.s3")
    with pytest.raises(ConfigurationError, match="obstore") as caught:
        files_of(StoreSettings(objects=ADDRESS))
    assert "pip install 'botocore>=" in caught.value.hint


def test_a_folder_and_nothing_are_places_too():
    assert files_of(StoreSettings()) is None
    assert files_of(StoreSettings(folder=Path("/shared"))).texts.where == "/shared"
