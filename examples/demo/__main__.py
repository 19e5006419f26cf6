"""``python -m examples.demo [MODEL]``."""

from examples.demo.run import app

# vLLM's child processes import this module.
if __name__ == "__main__":
    app()
