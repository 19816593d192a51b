"""Without the package of an extra, what needs it names the extra, and nothing else does."""

import subprocess
import sys

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.builtin.math.environment import Math
from rollout_service.environments.builtin.stem.environment import Stem

WITHOUT = "import sys; sys.modules['redis'] = None\n"


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=True
    ).stdout


def test_a_store_in_redis_names_the_extra():
    code = (
        "from rollout_service.base.errors import ConfigurationError\n"
        "try:\n"
        "    from rollout_service.store.redis import RedisStore\n"
        "except ConfigurationError as error:\n"
        "    print(error, error.hint)\n"
    )
    said = "a store in Redis needs the package redis, which is not installed Install the extra: "
    assert run(code) == f"{said}pip install 'rollout-service[redis]'.\n"


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
        assert "rollout-service[math]" in caught.value.hint
    Stem().check({"question": "What is it?", "answer": "A", "choices": ["red", "blue"]})
