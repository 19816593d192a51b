"""The site of the documentation: its pages are all listed, and no link leads out of it or to nothing."""

from pathlib import Path

import pytest
from docs_site.navigation import make_navigation
from docs_site.pages import stage_pages

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "docs" / "how-to").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "docs" / "README.md").write_text("# Docs\n\n## How-to: do\n| [Work](how-to/work.md) | |\n")
    return root


def test_a_link_out_of_the_folder_leads_to_a_copy_in_the_site(checkout, tmp_path):
    (checkout / "code" / "part.py").write_text("print(1)\n")
    (checkout / "code" / "README.md").write_text("See [the part](part.py).\n")
    (checkout / "docs" / "how-to" / "work.md").write_text(
        "[code](../../code/README.md#top) [x](https://a.b/c)\n"
    )
    stage_pages(checkout, tmp_path / "site")
    page = (tmp_path / "site" / "how-to" / "work.md").read_text()
    assert page == "[code](../repository/code/README.md#top) [x](https://a.b/c)\n"
    assert "(part.py.md)" in (tmp_path / "site" / "repository" / "code" / "README.md").read_text()
    assert "print(1)" in (tmp_path / "site" / "repository" / "code" / "part.py.md").read_text()


def test_a_link_to_nothing_fails_the_build(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("[gone](../gone.md)\n")
    with pytest.raises(SystemExit, match=r"docs/how-to/work\.md links to \.\./gone\.md"):
        stage_pages(checkout, tmp_path / "site")


def test_links_and_diagrams_in_code_blocks_stay_text(checkout, tmp_path):
    text = "```text\n[gone](../gone.md)\n```\n\n```mermaid\ngraph\n```\n"
    (checkout / "docs" / "how-to" / "work.md").write_text(text)
    stage_pages(checkout, tmp_path / "site")
    assert (tmp_path / "site" / "how-to" / "work.md").read_text() == text.replace("mermaid", "text")


def test_the_index_page_decides_the_navigation(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("# Work\n")
    stage_pages(checkout, tmp_path / "site")
    assert make_navigation(tmp_path / "site")[1] == {"How-to": [{"Work": "how-to/work.md"}]}


def test_a_page_that_the_index_does_not_list_fails_the_build(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("# Work\n")
    (checkout / "docs" / "how-to" / "rest.md").write_text("# Rest\n")
    stage_pages(checkout, tmp_path / "site")
    with pytest.raises(SystemExit, match=r"how-to/rest\.md"):
        make_navigation(tmp_path / "site")


def test_the_pages_of_this_checkout_can_be_staged(tmp_path):
    stage_pages(ROOT, tmp_path / "site")
    sections = [title for section in make_navigation(tmp_path / "site") for title in section]
    assert sections == ["Home", "Tutorials", "How-to guides", "Reference", "Explanation", "About"]
