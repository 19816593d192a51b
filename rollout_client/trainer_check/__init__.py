"""Checks that a trainer and the service agree, in the trainer's environment: `rollout-service trainer check`.

Every checked computation is the trainer's own code, from its hook to its loss, and is compared with one that shares
nothing with it. The pool serves the weights that it served before once the check has ended.
"""
