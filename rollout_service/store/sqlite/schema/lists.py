"""Version 7 of the schema: what lists of rollouts show and search. Version 9: the lists of groups, and the history of
runs, which begins with the groups that are closed from then on.

The figures of rollouts that had ended before are left out: a list takes them from the result, which only an erasure
changes. An index on one column is in the order of the rows' numbers, too.
"""

BEFORE_ENVIRONMENTS = """
ALTER TABLE rollouts ADD COLUMN environment TEXT NOT NULL DEFAULT '';
ALTER TABLE rollouts ADD COLUMN turns INTEGER;
ALTER TABLE rollouts ADD COLUMN tokens INTEGER;
ALTER TABLE rollouts ADD COLUMN worked REAL;
DROP TRIGGER terminal_is_final;
"""
ENVIRONMENTS = """
UPDATE rollouts SET environment = coalesce((
    SELECT iif(json_valid(request), json_extract(request, '$.task.environment'), '')
    FROM requests WHERE requests.seq = rollouts.seq
), '') WHERE seq > :after AND seq <= :until
"""
"""This reads every request, which takes long if there are many."""
AFTER_ENVIRONMENTS = """
CREATE TRIGGER terminal_is_final BEFORE UPDATE ON rollouts
WHEN OLD.state IN ('completed', 'failed', 'cancelled') BEGIN
    SELECT RAISE(ABORT, 'a terminal rollout never changes');
END;
CREATE INDEX by_environment ON rollouts (environment);
CREATE INDEX by_run ON rollouts (run) WHERE run IS NOT NULL;
CREATE INDEX by_code ON rollouts (code) WHERE code IS NOT NULL;
"""

VERSION_9 = """
CREATE TABLE group_history (
    run INTEGER NOT NULL, part INTEGER NOT NULL, records BLOB NOT NULL, PRIMARY KEY (run, part)
) STRICT;
CREATE INDEX groups_by_state ON groups (run, state, number, reason);
"""
