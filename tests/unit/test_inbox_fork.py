"""A process that forks goes on receiving after its child has ended."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from vllm_weir.frontend.inbox import Inbox
from vllm_weir.frontend.store import Store
inbox = Inbox(Store())
before = [sorted(files) for _, _, files in os.walk(sys.argv[1])]
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert [sorted(files) for _, _, files in os.walk(sys.argv[1])] == before, "its child took the sockets along"
inbox.close()
assert not os.listdir(sys.argv[1])
"""


def test_a_child_that_ends_leaves_the_sockets_of_its_parent(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
