"""``python -m vllm_weir.demo [MODEL]``."""

from vllm_weir.demo.run import app

# vLLM's child processes import this module.
if __name__ == "__main__":
    app()
