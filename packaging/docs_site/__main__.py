"""Build the site of the documentation, which needs no network to be built or read.

  scripts/docs                       build it into site/
  scripts/docs -o DIR --serve 8000   build it elsewhere, then serve it on the loopback until Ctrl-C

Guarantees: every link of a page leads to a page of the site, to a file that was copied into it, or to an address of the
web that the page names; anything else fails the build. The site loads nothing from another host.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from docs_site.navigation import make_navigation
from docs_site.pages import stage_pages
from docs_site.reference import write_reference

ROOT = Path(__file__).resolve().parents[2]
GITHUB_ANCHORS = {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}}
"""Headings get the anchors that GitHub gives them, since the pages link to those."""

OF_A_SITE = "objects.inv"
"""A file of every site, and of few other folders."""


def configuration(staged: Path) -> dict[str, object]:
    """Return the generator's settings for staged pages, in MkDocs' format."""
    return {
        "site_name": "Rollout service",
        "site_description": "Agentic rollouts in sandboxes for any RL trainer, over HTTP",
        "docs_dir": "docs",
        "site_dir": "site",
        "use_directory_urls": False,  # so that pages open from a folder too
        "nav": make_navigation(staged / "docs"),
        "theme": {
            "name": "material",
            "font": False,  # the fonts would come from another host
            "features": ["navigation.indexes", "navigation.top", "content.code.copy", "search.highlight"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "extra": {"generator": False},  # a link to another host on each page
        "markdown_extensions": [
            "admonition",
            "attr_list",
            "md_in_html",
            "tables",
            {"toc": {"permalink": True, "slugify": GITHUB_ANCHORS}},
            "pymdownx.superfences",
            {"pymdownx.highlight": {"pygments_lang_class": True}},
        ],
        "plugins": [
            "search",
            {
                "mkdocstrings": {
                    "handlers": {
                        "python": {
                            "paths": [str(ROOT)],
                            "options": {
                                "docstring_style": "google",
                                "members_order": "source",
                                "show_root_heading": True,
                                "show_root_full_path": True,
                                "show_source": False,
                                "show_if_no_docstring": False,
                                "heading_level": 2,
                                "separate_signature": True,
                                "show_signature_annotations": True,
                            },
                        }
                    }
                }
            },
        ],
    }


def build(output: Path, work: Path) -> None:
    """Build the site into `output`, in place of an earlier one; `work` is an empty folder for the staged pages.

    Raises:
        SystemExit: A page has a link that leads nowhere, the generator fails, or `output` holds something else.
    """
    if output.exists() and any(output.iterdir()) and not (output / OF_A_SITE).exists():
        raise SystemExit(f"{output} holds other files: name a new folder, an empty one, or that of an earlier site")
    stage_pages(ROOT, work / "docs")
    write_reference(ROOT, work / "docs" / "reference")
    settings = configuration(work)
    config = work / "mkdocs.yml"
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    generator = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [str(generator), "build", "--clean", "--strict", "--config-file", config],
        capture_output=True,
        text=True,
        cwd=work,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}the site could not be built")
    put_in_place(work / "site", output.resolve())


def put_in_place(site: Path, output: Path) -> None:
    """Replace an earlier site; whatever cuts this off, there is a whole site or none."""
    draft = output.with_name(f"{output.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(site, draft)
    shutil.rmtree(output, ignore_errors=True)
    draft.rename(output)


def serve(folder: Path, port: int) -> None:
    """Serve a folder on the loopback until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        sys.stderr.write(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stderr.write("\n")


def main() -> None:
    """Build the site, and serve it if asked to."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "site", help="folder of the site")
    parser.add_argument("--serve", type=int, metavar="PORT", help="then serve it on the loopback")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        build(arguments.output, Path(work))
    sys.stderr.write(f"the site is in {arguments.output}\n")
    if arguments.serve is not None:
        serve(arguments.output, arguments.serve)


if __name__ == "__main__":
    main()
