"""Blocks of shell on the pages are run unless a comment before them says why not."""

from tests.support.pages import blocks
from tests.support.pages.blocks import shell_blocks

PAGE = """# Page
```bash
echo one
```

<!-- not run: it needs a GPU -->
```sh
serve
```

<!-- run after: touch a; touch b -->
```bash
ls a
ls b
```

```toml
[table]
```
"""


def test_a_block_is_run_unless_a_comment_says_why_not(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    plain, marked, after = shell_blocks("page.md")
    assert (plain.line, plain.text, plain.not_run, plain.after) == (3, "echo one\n", "", "")
    assert (marked.line, marked.not_run) == (8, "it needs a GPU")
    assert (after.text, after.after) == ("ls a\nls b\n", "touch a; touch b")
