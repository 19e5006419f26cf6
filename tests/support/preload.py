"""What the server imports that the processes of `tests.support.engines.quick_processes` are forked from."""

import os

from tests.support.zygote import import_vllm

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as for the other forks
import_vllm()
