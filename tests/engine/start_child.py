"""What an engine does with Weir off or incomplete.

``python -m tests.engine.start_child MODEL_DIR {plain|no-patch-point}``
"""

from __future__ import annotations

import json
import sys

from tests.support.engines import close_all, get_llm


def main(model_dir: str, mode: str) -> None:
    if mode == "no-patch-point":
        import vllm.v1.core.kv_cache_manager as module

        module.KVCacheManager.fetch_computed_blocks = module.KVCacheManager.get_computed_blocks
        del module.KVCacheManager.get_computed_blocks
        import vllm.v1.core.sched.scheduler as user

        # The renamed method keeps vLLM itself going, as a later version of it would.
        original = user.Scheduler.__init__

        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.kv_cache_manager.get_computed_blocks = self.kv_cache_manager.fetch_computed_blocks

        user.Scheduler.__init__ = init
    llm = get_llm(model_dir)
    import vllm_weir as weir
    from tests.engine.common import prompts, sampling

    found: dict = {"tokens": [list(o.outputs[0].token_ids) for o in llm.generate(prompts([5, 9]), sampling(4))]}
    for name, extra in (
        ("weir", {"weir": {"v": 1, "capture": []}}),
        ("lens", {"output_residual_stream": [0]}),
        ("steer", {"apply_steering_vectors": [{}]}),
    ):
        try:
            llm.generate(prompts([5, 9]), sampling(4, extra_args=extra))
            found[name] = None
        except weir.WeirError as e:
            found[name] = [e.field, e.message]
    again = [list(o.outputs[0].token_ids) for o in llm.generate(prompts([5, 9]), sampling(4))]
    found["goes_on"] = again == found["tokens"]
    print("FOUND " + json.dumps(found))
    close_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
