"""The plugin for ms-swift's trainer: `--external_plugins swift_plugin.py`.

WEIGHTS is a folder that the trainer and the service's engines share; the service is at ROLLOUT_URL.
"""

import os

from rollout_client.adapters.swift import install

install(weights=os.environ["WEIGHTS"])
