"""Runs on_other_device.py in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_all_of_it_on_a_device_that_is_not_the_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(TESTS / "on_other_device.py")],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=TESTS.parent,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
