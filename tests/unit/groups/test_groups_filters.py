"""Each filter follows its rule, the first to drop a group gives the reason, and plug-ins are filters like others."""

from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.runs.auxiliary import RewardPart
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.groups import GroupFilter, GroupOutcome, RewardFilter, SampleOutcome, Verdict
from rollout_service.groups.filters import (
    KEEP,
    STALE,
    AllFailed,
    FilterChain,
    FilterRegistry,
    ZeroVariance,
    require_outcome_filters,
)


class Never(GroupFilter):
    """Drops everything."""

    because: str = "never"

    def judge(self, group):
        return Verdict(keep=False, reason=self.because)


def group(*rewards, **facts):
    samples = [
        SampleOutcome(number, reward, masked="engine_lost" if reward is None else None, **facts)
        for number, reward in enumerate(rewards)
    ]
    return GroupOutcome(7, tuple(samples))


def mixed(name, values):
    samples = [SampleOutcome(number, float(number % 2), **{name: value}) for number, value in enumerate(values)]
    return GroupOutcome(7, tuple(samples))


OUTCOMES_ALIKE = GroupOutcome(
    7,
    tuple(
        SampleOutcome(
            number,
            0.0,
            parts={
                RewardPart.PERF: 0.0,
                RewardPart.PARALLEL: number / 4,
                RewardPart.FINISH: 1.0,
                RewardPart.REWARD: 0.2 + 0.3 * number / 4,
            },
        )
        for number in range(4)
    ),
)
"""All failed, while they handed on more or less work."""


@pytest.mark.parametrize(
    ("name", "options", "outcome", "reason"),
    [
        ("zero_variance", {}, group(1.0, 1.0), "zero_variance"),
        ("zero_variance", {}, group(1.0, None, 1.0), "zero_variance"),
        ("zero_variance", {}, group(1.0), ""),
        ("zero_variance", {}, group(1.0, 0.0), ""),
        ("zero_variance", {"tolerance": 0.1}, group(0.5, 0.55), "zero_variance"),
        ("zero_variance", {"tolerance": 0.5}, group(0.0, 0.5), "zero_variance"),
        ("all_failed", {}, group(0.0, -1.0), "all_failed"),
        ("all_failed", {}, group(0.0, 0.1), ""),
        ("all_failed", {"at_most": 0.2}, group(0.0, 0.1), "all_failed"),
        ("accuracy_band", {"low": 0.5}, group(0.0, 0.0, 1.0), "too_hard"),
        ("accuracy_band", {"high": 0.5}, group(1.0, 0.0, 1.0), "too_easy"),
        ("accuracy_band", {"low": 0.5, "high": 0.5}, group(1.0, 0.0), ""),
        ("accuracy_band", {"low": 0.5, "high": 0.5}, group(1.0, 0.0, None), ""),
        ("too_long", {"max_tokens": 10}, mixed("sampled_tokens", [10, 11]), "too_long"),
        ("too_long", {"max_tokens": 10, "max_share": 0.5}, mixed("sampled_tokens", [10, 11]), ""),
        ("malformed_calls", {}, mixed("malformed_calls", [0, 1]), "malformed_calls"),
        ("malformed_calls", {"max_share": 0.5}, mixed("malformed_calls", [0, 3]), ""),
        ("truncated", {}, mixed("truncated", [False, True]), "truncated"),
        ("truncated", {}, mixed("truncated", [False, False]), ""),
        ("zero_variance", {}, OUTCOMES_ALIKE, "zero_variance"),
        ("zero_variance", {"part": "perf"}, OUTCOMES_ALIKE, "zero_variance"),
        ("zero_variance", {"part": "parallel"}, OUTCOMES_ALIKE, ""),
        ("zero_variance", {"part": "finish"}, OUTCOMES_ALIKE, "zero_variance"),
        ("zero_variance", {"part": "reward"}, OUTCOMES_ALIKE, ""),
        ("all_failed", {}, OUTCOMES_ALIKE, "all_failed"),
        ("all_failed", {"part": "reward"}, OUTCOMES_ALIKE, ""),
        ("accuracy_band", {"low": 0.5}, OUTCOMES_ALIKE, "too_hard"),
        ("accuracy_band", {"low": 0.5, "part": "finish"}, OUTCOMES_ALIKE, ""),
    ],
)
def test_each_filter_has_its_rule_for_the_outcome_or_a_named_part(name, options, outcome, reason):
    verdict = FilterRegistry().make(name, options).judge(outcome)
    assert verdict == (Verdict(keep=False, reason=reason) if reason else KEEP)


def test_parts_that_a_run_does_not_have_are_refused_by_their_paths():
    filters = [ZeroVariance(), Never(), AllFailed(part="finish"), ZeroVariance(part="parallel")]
    with pytest.raises(InvalidFieldError) as refused:
        require_outcome_filters(filters)
    paths = [error.path for error in refused.value.fields]
    assert paths == ["body.filters.2.options.part", "body.filters.3.options.part"]
    require_outcome_filters([ZeroVariance(part="reward"), AllFailed(part="perf")])


def test_a_chain_names_the_parts_that_it_looks_at():
    chain = FilterChain((Never(), AllFailed(), ZeroVariance(part="parallel"), ZeroVariance()))
    assert chain.parts == ["perf", "parallel"]
    assert not isinstance(Never(), RewardFilter)
    assert FilterChain((Never(),)).parts == []


def test_the_first_filter_that_drops_gives_the_reason():
    failed = group(0.0, 0.0)
    assert FilterChain((ZeroVariance(), AllFailed())).judge(failed).reason == "zero_variance"
    assert FilterChain((AllFailed(), ZeroVariance())).judge(failed).reason == "all_failed"
    assert FilterChain(()).judge(failed) == KEEP


@given(st.lists(st.none() | st.floats(0, 1), max_size=8), st.integers(0, 8))
def test_filters_never_see_a_group_with_too_few_usable_samples(rewards, least):
    verdict = FilterChain((Never(),), min_usable=least).judge(group(*rewards))
    usable = sum(reward is not None for reward in rewards)
    assert verdict.reason == ("too_few_usable" if usable < max(1, least) else "never")


def test_an_unknown_filter_is_refused_with_the_nearest():
    with pytest.raises(InvalidFieldError, match="did you mean zero_variance") as caught:
        FilterRegistry().make("zero_varience", field="body.filters.0")
    assert caught.value.fields[0].path == "body.filters.0.name"
    assert "all_failed" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("too_long", {}, "body.filters.2.options.max_tokens"),
        ("too_long", {"max_tokens": 0}, "body.filters.2.options.max_tokens"),
        ("zero_variance", {"tolerence": 1}, "body.filters.2.options.tolerence"),
        ("zero_variance", {"part": "speed"}, "body.filters.2.options.part"),
        ("accuracy_band", {"low": 2}, "body.filters.2.options.low"),
        ("accuracy_band", {"high": 1.1}, "body.filters.2.options.high"),
        ("accuracy_band", {"low": 0.8, "high": 0.2}, "body.filters.2.options"),
    ],
)
def test_the_error_for_a_wrong_option_has_its_path(name, options, path):
    with pytest.raises(InvalidFieldError) as caught:
        FilterRegistry().make(name, options, field="body.filters.2")
    assert [field.path for field in caught.value.fields] == [path]


def test_a_plug_in_is_a_filter_like_any_other():
    plugin = EntryPoint("never", f"{__name__}:Never", "rollout_service.filters")
    registry = FilterRegistry.load(plugins=[_loaded(plugin, Never)])
    made = registry.make("never", {"because": "it is Monday"})
    assert made.judge(group(1.0, 0.0)).reason == "it is Monday"
    assert "never" in registry.names


class _LoadedEntryPoint(EntryPoint):
    """An entry point that already has its object, because a test module cannot be imported by name."""

    def load(self):
        return vars(self)["loaded"]


def _loaded(plugin, value):
    made = _LoadedEntryPoint(plugin.name, plugin.value, plugin.group)
    vars(made)["loaded"] = value
    return made


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (EntryPoint("broken", "no_such_module:Filter", "rollout_service.filters"), "cannot be loaded"),
        (EntryPoint("broken", "math:sqrt", "rollout_service.filters"), "not a GroupFilter"),
    ],
)
def test_a_broken_plug_in_does_not_hide_other_filters(plugin, message):
    registry = FilterRegistry.load(plugins=[plugin])
    assert registry.make("zero_variance") == ZeroVariance()
    with pytest.raises(ConfigurationError, match=message):
        registry.make("broken")


def test_a_plug_in_cannot_take_a_built_in_name():
    plugin = _loaded(EntryPoint("truncated", "x:y", "rollout_service.filters"), Never)
    registry = FilterRegistry.load(plugins=[plugin])
    assert "already registered" in str(registry.problems["truncated"])
    assert not isinstance(registry.make("truncated"), Never)


SAMPLES = st.builds(
    lambda reward, oldest: SampleOutcome(0, reward, None if reward is not None else "gone", oldest_version=oldest),
    st.none() | st.floats(0, 1),
    st.none() | st.integers(0, 6),
)


@given(st.lists(SAMPLES, max_size=6), st.none() | st.integers(0, 6))
def test_masking_what_is_stale_leaves_the_rest(samples, bound):
    whole = GroupOutcome(0, tuple(samples))
    fresh = whole.without_older_than(bound)
    assert all(
        after == before or (before.usable and before.oldest_version < bound and after.masked == STALE)
        for before, after in zip(whole.samples, fresh.samples, strict=True)
    )
    assert bound is None or fresh.oldest_version is None or fresh.oldest_version >= bound
    assert fresh.without_older_than(bound) == fresh
