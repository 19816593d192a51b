"""Bounds how often a session is restarted, so that code that keeps killing its session costs little.

A few starts are free, for an agent that types `exit` or runs out of memory. After those, a session starts once every
`PERIOD` seconds, and the caller waits. Starting a kernel takes a quarter of a second of processor time, which
neighboring sandboxes would notice.
"""

from sandboxes.limits.token_bucket import TokenBucket

FREE = 5
"""Starts without a wait, including the first."""
PERIOD = 5.0
"""Seconds in which one more start becomes free."""


def restart_limiter() -> TokenBucket:
    """Return the limit on the starts of one session."""
    return TokenBucket(FREE, PERIOD)
