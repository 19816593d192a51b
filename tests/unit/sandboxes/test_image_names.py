"""Downloaded data names images and files of its own folder, and no other path of this machine."""

import inspect

import pytest

import sandboxes
from sandboxes import config, contract, errors, factory
from sandboxes.errors import ImagePathError
from sandboxes.image_names import find_own_file, read_image_name
from sandboxes.images.dockerfiles import dockerfile_at, find_bases
from sandboxes.images.store import ImageStore

PATHS = [
    *("/", "/etc", "//etc", "/root/.ssh/x.sif", "./x", "../x", "../../etc", "a/../../etc", "a/./b", "."),
    *("~", "~/", "~root/x", "$HOME/x", "${HOME}", "x.sif", "images/x.sif", "x.img", "file:///etc", "file:/etc"),
    *("oci:/etc", "oci:x", "oci:x:tag", "oci-archive:x.tar", "oci-archive:/etc/passwd", "docker-archive:x.tar"),
    *("docker-daemon:alpine:3", "localimage:x", "dir:x", "sif:x", "instance://x", "containers-storage:x"),
    *("", " ", "a b", "a\nb", "a\0b", "-v", "--bind=/etc", "a//b", "a/", ":x", "a@b", "x" * 600, "é"),
]


@pytest.mark.parametrize("text", PATHS)
def test_data_names_no_path(text):
    with pytest.raises(ImagePathError) as caught:
        read_image_name(text)
    assert "image list" in caught.value.hint
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("base", "base"),
        ("swe-a__b-1", "swe-a__b-1"),
        ("python:3.12-slim", "docker://python:3.12-slim"),
        ("swebench/sweb.eval.x86_64.a_1776_b-1:1", "docker://swebench/sweb.eval.x86_64.a_1776_b-1:1"),
        ("ghcr.io/Org/x@sha256:0a1b", "docker://ghcr.io/Org/x@sha256:0a1b"),
        ("localhost:5000/x/y:1", "docker://localhost:5000/x/y:1"),
        ("docker://python:3.12", "docker://python:3.12"),
        ("oras://ghcr.io/a/b.sif:1", "oras://ghcr.io/a/b.sif:1"),
        ("https://example.org/x.sif?a=b", "https://example.org/x.sif?a=b"),
    ],
)
def test_data_names_images_of_this_machine_and_of_registries(text, image):
    assert read_image_name(text) == image


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("/images/swe-1.sif", "/images/swe-"),
        ("/images//etc/x.sif", "/images/"),
        ("~/images/1", "~/images/"),
        ("images/1.sif", "images/"),
        ("oci-archive:/images/1.tar", "oci-archive:/images/"),
    ],
)
def test_an_image_may_be_below_a_folder_that_an_administrator_wrote(text, prefix):
    assert read_image_name(text, prefix=prefix) == text
    for outside in (f"{prefix}../../etc/x.sif", f"{prefix}/..", "/etc/x.sif", f"{prefix}\0.sif"):
        with pytest.raises(ImagePathError):
            read_image_name(outside, prefix=prefix)


@pytest.mark.parametrize("prefix", ["", "/", "//", "oci-archive:", "x"])
def test_a_prefix_without_a_folder_allows_no_path(prefix):
    with pytest.raises(ImagePathError):
        read_image_name(f"{prefix}/etc/x.sif", prefix=prefix)


def test_a_file_of_ones_own_is_below_the_folder_wherever_links_lead(tmp_path):
    folder, outside = tmp_path / "task", tmp_path / "outside.sif"
    folder.mkdir()
    outside.touch()
    (folder / "own.sif").touch()
    (folder / "again.sif").symlink_to("own.sif")
    (folder / "link.sif").symlink_to(outside)
    (folder / "loop.sif").symlink_to("loop.sif")
    assert find_own_file(folder, "own.sif") == find_own_file(folder, "again.sif") == folder / "own.sif"
    (tmp_path / "same").symlink_to(folder)
    assert find_own_file(tmp_path / "same", "own.sif") == folder / "own.sif"
    missing = ("link.sif", "loop.sif", "none.sif", "../outside.sif", str(outside), ".", "", "a\0", "x" * 300)
    for name in missing:
        assert find_own_file(folder, name) is None


@pytest.mark.parametrize(
    "text",
    [
        *(f"FROM {name}" for name in ("/", "/etc", "../../etc", "~/", "x.sif", "oci-archive:/etc/passwd", "file:/etc")),
        "ARG BASE=/etc\nFROM $BASE",
        "FROM python:3.12\nCOPY --from=/etc passwd /x",
        "FROM python:3.12\nRUN --mount=type=bind,from=/etc,target=/x true",
    ],
)
def test_a_dockerfile_has_no_base_of_the_host_but_those_that_are_given(tmp_path, text):
    file, own = tmp_path / "Dockerfile", tmp_path / "own"
    file.write_text(text)
    own.mkdir()
    given = {"python:3.12": str(own)}
    with pytest.raises(ImagePathError, match=r"^Dockerfile:\d: the base ") as caught:
        find_bases(ImageStore(tmp_path / "images"), dockerfile_at(file), given)
    assert "--base" in caught.value.hint
    path = str(caught.value).split("'")[1]
    assert own in find_bases(ImageStore(tmp_path), dockerfile_at(file), {**given, path: str(own)}).bases.values()


def test_the_public_names_are_importable_from_the_package():
    for module in (config, contract, errors, factory):
        own = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__.startswith("sandboxes")
        }
        assert own - {"parse_user_range"} <= set(sandboxes.__all__), module.__name__
    for name in sandboxes.__all__:
        assert hasattr(sandboxes, name)
