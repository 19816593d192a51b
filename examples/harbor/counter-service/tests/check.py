"""Starts the service, asks it three times, and prints the share of right answers."""

import json
import subprocess
import time
import urllib.request

START = "/srv/counter/start.sh"
SECONDS = 20.0


def ask(deadline: float) -> str:
    while True:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8765/next", timeout=5) as answer:
                return answer.read(100).decode(errors="replace").strip()
        except OSError:
            if time.monotonic() > deadline or service.poll() is not None:
                return ""
            time.sleep(0.05)


right = 0
try:
    service = subprocess.Popen(
        ["bash", START], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
except OSError:
    pass
else:
    deadline = time.monotonic() + SECONDS
    right = sum(ask(deadline) == str(number) for number in (1, 2, 3))
    service.kill()
print(json.dumps({"reward": float(right == 3), "right": right / 3}))
