"""``python -m vllm_weir.demo [MODEL]``."""

from vllm_weir.demo.run import app

# vLLM starts processes that import this module again.
if __name__ == "__main__":
    app()
