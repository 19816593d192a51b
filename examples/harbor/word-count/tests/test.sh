#!/bin/bash
# The test leaves a report, /logs/verifier/ctrf.json, which shows that it ran.
python3 /tests/test_count.py
if [ $? -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
