"""The admission formula agrees with an independent model, and bounds how far groups run ahead of the trainer."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_service.groups.acceptance import AcceptanceRate, AdmissionState, admission_capacity, groups_to_start


class AdmissionMachine(RuleBasedStateMachine):
    """A model that does not use the formula: it computes the step in which a group would be trained on.

    Groups are trained on B at a time. A group may start if, when all existing groups are kept, it would be trained on
    at most `eta` steps after the trainer's current one.
    """

    @initialize(size=st.integers(1, 5), eta=st.integers(0, 4), most=st.integers(1, 30), version=st.integers(0, 6))
    def start(self, size, eta, most, version):
        """Start at a version, as after a restart without a record of what was trained on."""
        self.size, self.eta, self.most = size, eta, most
        self.step = version
        self.trained = version * size
        self.acknowledged = self.ready = self.batched = self.running = 0
        self.granted_in_step = 0

    @property
    def state(self):
        return AdmissionState(
            batch_size=self.size,
            max_concurrent=self.most,
            max_staleness=self.eta,
            prefetch_batches=1_000,
            version=self.step,
            running=self.running,
            ready=self.ready,
            batched=self.batched,
            acknowledged=self.acknowledged,
        )

    def may_begin(self):
        position = self.trained + self.batched + self.ready + self.running
        return self.running < self.most and position // self.size <= self.step + self.eta

    @precondition(lambda self: admission_capacity(self.state) > 0)
    @rule(data=st.data())
    def begin(self, data):
        groups = data.draw(st.integers(1, admission_capacity(self.state)))
        self.running += groups

    @precondition(lambda self: self.running)
    @rule(kept=st.booleans())
    def end(self, kept):
        self.running -= 1
        self.ready += kept

    @precondition(lambda self: self.ready >= self.size and not self.batched)
    @rule()
    def lease(self):
        self.ready -= self.size
        self.batched += self.size

    @precondition(lambda self: self.batched)
    @rule()
    def train_and_acknowledge(self):
        self.batched -= self.size
        self.acknowledged += self.size
        self.trained += self.size
        self.step += 1

    @precondition(lambda self: self.ready)
    @rule()
    def drop(self):
        self.ready -= 1

    @rule()
    def lose_what_runs(self):
        self.running = 0

    @rule(most=st.integers(1, 30))
    def change_limit(self, most):
        self.most = most

    @invariant()
    def grants_as_the_model_does(self):
        if hasattr(self, "size"):
            assert (admission_capacity(self.state) > 0) == self.may_begin()

    @invariant()
    def never_runs_further_ahead_than_eta(self):
        if hasattr(self, "size"):
            assert self.ready + self.batched + self.running <= (self.eta + 1) * self.size


TestAdmission = AdmissionMachine.TestCase

count = st.integers(0, 50)


@given(st.integers(-3, 50), st.integers(1, 20), count, count, count, count, count)
def test_the_formula(most, size, eta, version, ready, acknowledged, running):
    state = AdmissionState(size, most, eta, 1, version, running=running, ready=ready, acknowledged=acknowledged)
    allowed = (eta + version + 1) * size - (state.accepted + running)
    assert admission_capacity(state) == min(max(1, most) - running, allowed)


@given(st.integers(1, 20), st.integers(0, 8), st.integers(0, 10_000), st.data())
def test_a_restart_is_granted_at_most_max_staleness_plus_one_batches(size, eta, version, data):
    """This holds for any number of groups acknowledged before, and however many are kept."""
    acknowledged = data.draw(st.integers(0, (version + 2) * size))
    granted = ready = 0
    while True:
        state = AdmissionState(size, 10**9, eta, 10**6, version, ready=ready, acknowledged=acknowledged)
        groups = admission_capacity(state)
        if groups <= 0:
            break
        granted += groups
        ready += groups
    assert granted <= (eta + 1) * size
    if acknowledged <= version * size:
        assert granted == (eta + 1) * size


@given(count, st.integers(1, 30))
def test_without_max_staleness_only_concurrency_limits(running, most):
    state = AdmissionState(1, most, None, 1, version=0, running=running, ready=10**6)
    assert admission_capacity(state) == most - running


@given(st.integers(1, 20), st.integers(0, 8), st.integers(0, 4), count, count)
def test_groups_to_start_are_within_the_capacity_and_never_negative(size, eta, ahead, running, ready):
    state = AdmissionState(size, 16, eta, ahead, version=0, running=running, ready=ready)
    groups = groups_to_start(state, {}, AcceptanceRate())
    assert 0 <= groups <= max(0, admission_capacity(state))
    if ready >= (1 + ahead) * size:
        assert groups == 0
