"""One fixed workload, run alone in a process: what requests without keys get, beside neighbours with or without them.

``python -m tests.engine.workload MODEL_DIR OUT.json [capture]`` (WEIR_DISABLE is read by the plugin).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.engines import close_all, get_llm


def main(model_dir: str, out: str, capturing: bool) -> None:
    from tests.engine.common import SELECTORS, prompts, sampling

    llm = get_llm(model_dir, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=16)
    plain = sampling(16, logprobs=5, prompt_logprobs=2)
    # No seeds: in chunked prefill on CPU vLLM cannot rewind a generator.
    drawn = sampling(16, logprobs=5, repetition_penalty=1.3)
    neighbours = [sampling(16) for _ in SELECTORS]
    if capturing:
        import vllm_weir as weir

        neighbours = [weir.params(p, capture=weir.Capture(positions=s)) for p, s in zip(neighbours, SELECTORS)]
    every, asked = [], []
    for i, neighbour in enumerate(neighbours):
        every += prompts([20 + 3 * i] * 2)
        asked += [plain if i % 2 else drawn, neighbour]
    found = []
    for again in range(2):
        outs = llm.generate(every, asked, use_tqdm=False)
        for o in outs[::2]:
            steps = [o.outputs[0].logprobs, o.prompt_logprobs or []]
            numbers = [sorted((t, p.logprob.hex()) for t, p in (step or {}).items()) for part in steps for step in part]
            found.append([again, list(o.outputs[0].token_ids), o.outputs[0].text, numbers])
        assert not capturing or all(o.activations is not None for o in outs[1::2])
    Path(out).write_text(json.dumps(found))
    close_all()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "capture" in sys.argv[3:])
