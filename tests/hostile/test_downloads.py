"""No downloaded task, instance or Dockerfile brings a file of the host into a sandbox or an image."""

import pytest

from tests.support.hostile.downloads import DOWNLOADS


@pytest.mark.parametrize("name", DOWNLOADS)
def test_no_file_of_the_host_is_reached(tmp_path, name):
    DOWNLOADS[name](tmp_path)
