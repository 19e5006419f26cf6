"""``python -m vllm_weir.cli``: the command ``weir``."""

from vllm_weir.cli.main import app

app(prog_name="weir")
