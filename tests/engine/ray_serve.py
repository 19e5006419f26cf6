"""Two replicas of the shipped model in an application of Ray Serve LLM, configured as docs/guides/deploy.md has it.

python tests/engine/ray_serve.py STORE PORT
"""

from __future__ import annotations

import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

import vllm_weir as weir
from tests.engine.serving import ADMIN_KEY


def config(store: str) -> LLMConfig:
    environment = {
        "VLLM_PLUGINS": "weir",
        "WEIR_SERVE_STORE": store,
        "WEIR_ADMIN_KEY": ADMIN_KEY,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    engine = {"dtype": "float32", "max_model_len": 256, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    return LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": weir.demo_model()},
        placement_group_config={"bundles": [{"CPU": 1}]},  # without a GPU in it, vLLM runs on the processor
        deployment_config={"num_replicas": 2},
        engine_kwargs=engine | {"enforce_eager": True},
        log_engine_metrics=False,
        runtime_env={"env_vars": environment},
    )


def main() -> None:
    store, port = sys.argv[1:]
    ray.init(address="local", num_cpus=8, include_dashboard=False)  # what Ray may plan with; all share the cores
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build_openai_app({"llm_configs": [config(store)]}))
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
