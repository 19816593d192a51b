"""The folders that a launch makes in an image lie inside it, wherever the image's links lead."""

import os
from pathlib import Path

import pytest

from sandboxes.providers.apptainer.launch import find_inside, make_point


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image whose links lead to its own folders, to nowhere, and up; `outside` lies next to it."""
    (tmp_path / "outside").mkdir()
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    (image / "run").mkdir()
    (image / "var").mkdir()
    (image / "var/run").symlink_to("/run")
    (image / "etc/resolv.conf").symlink_to("../run/resolver/stub.conf")
    (image / "up").symlink_to("../../../../outside")
    (image / "host").symlink_to(tmp_path / "outside")
    (image / "loop").symlink_to("loop")
    return image


def make(image: Path, path: str) -> None:
    make_point(str(image), path, os.geteuid(), os.getegid())


def test_links_are_followed_inside(image):
    make(image, "/var/run/pipes/")
    assert (image / "run/pipes").is_dir()
    make(image, "/etc/resolv.conf")
    assert (image / "run/resolver/stub.conf").read_bytes() == b""
    assert (image / "etc/resolv.conf").is_symlink()


@pytest.mark.parametrize("path", ["/up/new/", "/host/new", "/../outside/new/", "/up/../../outside/new"])
def test_nothing_is_made_outside(image, path):
    make(image, path)
    assert list((image.parent / "outside").iterdir()) == []
    assert sorted(found.name for found in image.parent.iterdir()) == ["image", "outside"]
    found = Path(find_inside(str(image), path))
    assert found.is_relative_to(image)
    assert found.is_dir() == path.endswith("/")


def test_what_exists_is_left_as_it_is(image):
    (image / "etc/hosts").write_text("::1 localhost\n")
    (image / "run").chmod(0o700)
    make(image, "/etc/hosts")
    make(image, "/run/")
    assert (image / "etc/hosts").read_text() == "::1 localhost\n"
    assert (image / "run").stat().st_mode & 0o777 == 0o700


def test_a_loop_of_links_is_an_error(image):
    with pytest.raises(OSError, match="loop"):
        make(image, "/loop/new/")
