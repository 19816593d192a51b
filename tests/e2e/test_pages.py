"""Every shell block of the README, the tutorials and the guides runs as it stands, in the order of its page."""

import os

import pytest

from tests.support.newer_python import needs_python_312
from tests.support.pages.blocks import ROOT, shell_blocks
from tests.support.pages.terminals import run_blocks

pytestmark = [
    pytest.mark.extended("README.md", "docs/tutorials/", "docs/how-to/", "rollout_service/cli/"),
    pytest.mark.apptainer,
    pytest.mark.timeout(600),
    pytest.mark.slow(seconds=30),
]
if os.geteuid() != 0:
    pytestmark.append(pytest.mark.skip(reason="only root gives each page a network of its own"))

FILES = [ROOT / "README.md", *(ROOT / "docs/tutorials").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")]
BLOCKS = {str(file.relative_to(ROOT)): shell_blocks(str(file.relative_to(ROOT))) for file in sorted(FILES)}
PARTS = {
    "docs/how-to/slurm.md": [pytest.mark.slurm],
    "docs/how-to/bridge-nemo-gym.md": [needs_python_312],
}
RUN = {page: [block for block in blocks if not block.not_run] for page, blocks in BLOCKS.items()}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=PARTS.get(page, [])) for page, blocks in RUN.items() if blocks]
)
def test_the_blocks_of_a_page_run_as_they_stand(page, tmp_path):
    run_blocks(RUN[page], tmp_path)
