"""A tree that processes change while it is read is read all the same."""

import io
import os
import tarfile

from sandboxes.runtime import tree_reader


def test_what_is_removed_or_replaced_meanwhile_is_left_out(tmp_path, monkeypatch, capfdbinary):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "kept").write_text("x")
    (tree / "link").symlink_to("kept")
    read = os.readlink

    def replace_and_read(name: str, *, dir_fd: int) -> str:
        (tree / name).unlink()
        (tree / name).touch()
        return read(name, dir_fd=dir_fd)

    monkeypatch.setattr(tree_reader, "names_in", lambda *_: ["kept", "link", "removed"])
    monkeypatch.setattr(os, "readlink", replace_and_read)
    tree_reader.main(str(tree), 1 << 20, 0, 0)
    with tarfile.open(fileobj=io.BytesIO(capfdbinary.readouterr().out)) as archive:
        assert archive.getnames() == ["tree", "tree/kept"]
