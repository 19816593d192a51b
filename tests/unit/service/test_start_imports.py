"""A service imports only what it needs, and names the extra of a package that is missing."""

import re
import subprocess
import sys

import pytest
from pydantic import BaseModel

import rollout_service.server.api.app
from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.builtin.math.environment import Math
from rollout_service.environments.builtin.stem.environment import Stem

UNNEEDED = {
    "aiohttp": "environments of OpenEnv",
    "jupyter_client": "the first Python session",
    "math_verify": "the environment math, in processes of its own",
    "opentelemetry.sdk": "traces",
    "redis": "a store in Redis",
    "renderers": "the first backend",
    "rollout_service.authoring.attacks": "env attack",
    "rollout_service.authoring.audit": "env audit",
    "rollout_service.environments.bridges.openenv": "environments of OpenEnv",
    "rollout_service.environments.bridges.verifiers": "environments of verifiers",
    "rollout_service.authoring.openenv_server": "env serve",
    "rollout_service.store.redis": "a store in Redis",
    "rollout_service.testing": "tests",
    "tokenizers": "the first backend",
    "transformers": "the first backend",
}
"""Modules that a service imports when something needs them, and what does."""
IMPORT = re.compile(r"import time: +\d+ \| +\d+ \| *(\S+)")


@pytest.mark.slow
def test_a_started_service_has_imported_nothing_that_it_may_never_need(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "rollout_service.cli", "serve", "--port", "0"]
    command += ["--engine", "none", "--sandbox", "local", "--state-dir", str(tmp_path)]
    imported = set()
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if found := IMPORT.match(line):
                imported.add(found[1])
            elif " listening " in line:
                break
        process.terminate()
        process.communicate()
    assert "rollout_service.server.api.app" in imported
    assert {name: user for name, user in UNNEEDED.items() if name in imported} == {}


def test_no_model_reads_its_source_as_it_is_defined():
    """Pydantic would look through all modules for it; `field_docstrings` reads it when someone asks."""
    assert rollout_service.server.api.app
    models = [BaseModel]
    for model in models:
        models += model.__subclasses__()
    wrong = {model.__module__ for model in models if model.model_config.get("use_attribute_docstrings")}
    ours = {name for name in wrong if name.split(".")[0] in ("api_schemas", "rollout_service", "sandboxes")}
    assert ours <= {"rollout_service.authoring.openenv_messages"}  # which few processes import


@pytest.mark.slow
def test_the_process_of_the_proxies_imports_no_pydantic():
    """Each service with sandboxes that reach hosts starts one, and the settings' models would double its start."""
    command = [sys.executable, "-c", "import sandboxes.egress.process, sys; print('pydantic' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


WITHOUT = "import sys; sys.modules['redis'] = None\n"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=True).stdout


def test_a_store_in_redis_names_the_extra():
    code = (
        "from rollout_service.base.errors import ConfigurationError\n"
        "try:\n"
        "    from rollout_service.store.redis import RedisStore\n"
        "except ConfigurationError as error:\n"
        "    print(error, error.hint)\n"
    )
    said = "a store in Redis needs the package redis, which is not installed Install the extra 'redis': "
    assert re.fullmatch(rf"{said}pip install 'redis>=[\d.]+'\.\n", run(code))


def test_services_backups_and_jobs_without_redis_do_not_need_it():
    code = (
        "import rollout_service.server.api.serve, rollout_service.cli.backup\n"
        "import rollout_service.backup.creation, rollout_service.backup.restore, rollout_service.backup.slurm_jobs\n"
        "from rollout_service.cli import slurm, store\n"
        "print('imported')\n"
    )
    assert run(code) == "imported\n"


def test_a_task_whose_answer_is_compared_mathematically_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for environment in (Math(), Stem()):
        with pytest.raises(ConfigurationError, match="math-verify, which is not installed") as caught:
            environment.check({"question": "What is it?", "answer": "x^2"})
        assert "pip install 'math-verify[" in caught.value.hint
    Stem().check({"question": "What is it?", "answer": "A", "choices": ["red", "blue"]})
