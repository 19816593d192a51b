"""What an image says of its working folder and its user, which may be anything."""

import pytest

from sandboxes.images.facts import read_facts

PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:7:7::/home/app:/bin/sh\nodd:x:8:8::not-a-path:/bin/sh\nshort:x:9\n"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("/app", "/app"),
        ("/app/../b//", "/b"),
        ("/", None),
        ("", None),
        ("app", None),
        ("/a\nb", None),
        ("/a\0", None),
    ],
)
def test_working_folders(tmp_path, named, expected):
    assert read_facts(tmp_path, {"WorkingDir": named}).workdir == expected


@pytest.mark.parametrize(
    ("named", "user", "home"),
    [
        ("app", "app", "/home/app"),
        ("7:7", "app", "/home/app"),
        ("0", None, None),
        ("root:root", None, None),
        ("", None, None),
        ("1000", "1000", None),
        ("odd", "odd", None),
        ("short", "short", None),
        ("a\nb", None, None),
    ],
)
def test_users(tmp_path, named, user, home):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    found = read_facts(tmp_path, {"User": named, "WorkingDir": 7})
    assert (found.user, found.home) == (user, home)
    assert found.user_env == ({} if user is None else {"HOME": home or "/", "USER": user, "LOGNAME": user})
