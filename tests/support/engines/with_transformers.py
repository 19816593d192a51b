"""Ask transformers about a model, in a program of an environment that has it."""

import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id


def ask_transformers(environment: Path, script: str, order: Any) -> Any:
    """Run a script of this folder, and return its answer to an order."""
    command = [environment / "bin" / "python", "-W", "ignore", Path(__file__).with_name(script)]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def some_requests(seed: int, samplings: Sequence[SamplingOptions]) -> list[GenerateRequest]:
    """Return requests with prompts of many lengths, some of which share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(9, 500) for _ in range(120)]
    prompts = [[rng.randrange(9, 500) for _ in range(length)] for length in (1, 2, 17, 60, 120, 250)]
    prompts += [shared + prompt[:20] for prompt in prompts]
    return [
        GenerateRequest(new_request_id(), prompt, samplings[index % len(samplings)])
        for index, prompt in enumerate(prompts)
    ]
