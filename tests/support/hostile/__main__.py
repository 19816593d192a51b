"""Runs the attacks as a program."""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import anyio

from sandboxes import ApptainerConfig
from tests.support.hostile import CHECKS, NOTHING, NothingToAttackError
from tests.support.repeated_starts import RepeatedStarts


def main() -> int:
    """Run the named checks, or all of them; return the number of failures as the exit code."""
    parser = argparse.ArgumentParser(description="attacks on sandboxes")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("names", nargs="*", help="which to run; all without one")
    arguments = parser.parse_args()
    if arguments.list:
        sys.stdout.write("".join(f"{name}\n" for name in CHECKS))
        return 0
    return sum(not anyio.run(_passes, name) for name in arguments.names or CHECKS)


async def _passes(name: str) -> bool:
    with tempfile.TemporaryDirectory() as state:
        provider = RepeatedStarts(ApptainerConfig(), Path(state))
        begun = time.monotonic()
        try:
            await CHECKS[name](provider)
        except NothingToAttackError as error:
            sys.stdout.write(f"{name}: {NOTHING}: {error}\n")
            return True
        except Exception:
            logging.exception(name)
            return False
        finally:
            await provider.close()
    sys.stdout.write(f"{name} passed in {time.monotonic() - begun:.1f} s\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
