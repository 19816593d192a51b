"""The hook for TRL needs only the trainer attributes that TRL documents for hooks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from api_schemas.rollouts import RolloutState
from rollout_client.adapters.submit import RolloutSubmitter, TaskRowError
from rollout_client.adapters.trl import RolloutHook, columns, rows, service_reward
from tests.support.adapters.rollouts import TASK, rollout, segment

END = 2
ONE = rollout(segment([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]), rollout_id="a")
TWO = rollout(segment([1, 2, 3], [0, 1, 1]), segment([1, 9], [0, 1], parent=0), reward=0.0, rollout_id="b")
BAD = rollout(segment([1, 2], [0, 1]), reward=None, state=RolloutState.FAILED, rollout_id="c")


class Answers(RolloutSubmitter):
    """Returns prepared rollouts, and records the requests."""

    def run_all_blocking(self, requests):
        self.__dict__["requests"] = requests
        return [ONE, TWO, BAD][: len(requests)]


class Weights:
    """Records each push of weights."""

    def __init__(self) -> None:
        self.step, self.pushed = None, []

    def push(self, step, save):
        self.step = step
        self.pushed.append((step, save))

    def path(self, step):
        return Path(f"/weights/step-{step}")


class Accelerator:
    """One process of several."""

    def __init__(self, main: bool) -> None:
        self.is_main_process, self.waited = main, 0

    def wait_for_everyone(self) -> None:
        self.waited += 1


def trainer(step: int = 0, *, main: bool = True):
    saved: list[str] = []
    args = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": None, "max_completion_length": 99}
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        args=SimpleNamespace(**args),
        accelerator=Accelerator(main),
        processing_class=SimpleNamespace(eos_token_id=END),
        save_model=saved.append,
        saved=saved,
    )


def test_columns_are_aligned_and_a_failure_has_no_reward():
    got = columns([ONE, TWO, BAD], END)
    assert got["prompt_ids"] == [[1], [1], [END]]
    assert got["completion_ids"] == [[2, 3, 4, 5], [2, 3], [END]]
    assert got["env_mask"] == [[1, 1, 0, 1], [1, 1], [0]]
    assert got["logprobs"] == [[-0.2, -0.3, 0.0, -0.5], [-0.2, -0.3], [0.0]]
    assert got["rollout_reward"] == [1.0, 0.0, None]
    assert got["rollout_left_out"] == [0, 1, 0]
    assert got["rollout_id"] == ["a", "b", "c"]


def test_the_reward_function_gives_what_came_and_logs_what_failed():
    logged = {}
    got = columns([ONE, TWO, BAD], END)
    rewards = service_reward(prompts=[], completions=[], log_metric=logged.__setitem__, **got)
    assert rewards == [1.0, 0.0, None]
    assert logged == {"rollouts/failed": 1 / 3, "rollouts/turns": 0.0, "rollouts/left_out": 1 / 3}


def test_each_prompt_is_one_rollout_sampled_as_trl_says():
    hook = RolloutHook(Answers(), weights=None)
    (row,) = rows([TASK])
    got = hook([row["prompt"]] * 2, trainer(step=7))
    assert len(got["completion_ids"]) == 2
    requests = hook.submitter.requests
    assert len({request.rollout_id for request in requests}) == 2
    assert all(request.task == TASK for request in requests)
    assert (requests[0].sampling.temperature, requests[0].sampling.top_k) == (0.5, -1)
    assert requests[0].limits.max_tokens == 99
    assert requests[0].metadata == {"trainer": "trl", "step": 7}


def test_a_prompt_that_is_not_a_task_says_how_to_make_one():
    with pytest.raises(TaskRowError, match=r"task_text\(task\)"):
        RolloutHook(Answers(), weights=None)(["What is 2 + 2?"], trainer())


def test_weights_are_pushed_once_for_each_step():
    hook, prompt = RolloutHook(Answers(), weights="/weights"), rows([TASK])[0]["prompt"]
    hook.weights = Weights()
    first, second = trainer(0), trainer(3)
    for one in (first, first, second):
        hook([prompt], one)
    assert [step for step, _ in hook.weights.pushed] == [0, 3]
    assert first.accelerator.waited == second.accelerator.waited == 1


def test_other_processes_save_their_part_and_wait():
    hook = RolloutHook(Answers(), weights="/weights")
    hook.weights = Weights()
    other = trainer(4, main=False)
    hook([rows([TASK])[0]["prompt"]], other)
    assert hook.weights.pushed == []
    assert other.saved == ["/weights/step-4"]
    assert other.accelerator.waited == 1
