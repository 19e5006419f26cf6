"""The traps' tests run on the same engines and models as tests/engine."""

from tests.engine.conftest import close_engines, llm, no_engine_left_over, root, shared_server, truth

__all__ = ["close_engines", "llm", "no_engine_left_over", "root", "shared_server", "truth"]
