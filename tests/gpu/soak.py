"""Full capture at batch 64 with the shapes of Llama-3.1-8B, on and on: device and host memory; prints what it finds.

python tests/gpu/soak.py [--seconds 600] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path


def resident(pid: int) -> dict[str, int]:
    """Bytes that a process has touched: its own, and shared ones."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    }


def family() -> list[int]:
    """This process and all that it has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    mine = [os.getpid()]
    for pid in mine:
        mine += [child for child, parent in parents.items() if parent == pid]
    return mine


def device_bytes(worker) -> dict[str, int]:
    """Of the taps' tensors, which live as long as the engine."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    sizes = {}
    for module in worker.model_runner.get_model().modules():
        for name, buffer in module._buffers.items():
            if name.startswith("weir_") and buffer is not None:
                sizes[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
    return {"weir": sum(sizes.values()), "allocated": torch.cuda.memory_allocated(), "used": total - free}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    import vllm_weir as weir
    from vllm_weir.bench.reference import make_model
    from vllm_weir.config.settings import Settings

    llm = LLM(
        make_model(Path(tempfile.mkdtemp())), load_format="dummy", dtype="bfloat16", max_model_len=2048,
        skip_tokenizer_init=True, seed=0, gpu_memory_utilization=0.4, enable_prefix_caching=False,
        kv_cache_memory_bytes=8 << 30,  # others may be on the same GPU
        additional_config={"weir": {"host_bytes": 16 << 30}},
    )  # fmt: skip
    found: dict = {"buffer_bytes": Settings().buffer_bytes, "before": llm.collective_rpc(device_bytes)[0]}
    print(found, flush=True)
    base = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)
    params = weir.params(base, capture=weir.Capture("resid_post"))
    samples, device, rows, turn, outs = [], [], 0, 0, []
    started = time.monotonic()
    while time.monotonic() - started < given.seconds:
        prompts = [{"prompt_token_ids": [10 + (turn + k + i) % 900 for i in range(20 + 2 * k)]} for k in range(64)]
        outs = llm.generate(prompts, params, use_tqdm=False)
        rows += sum(len(out.activations[site]) for out in outs for site in out.activations.sites)
        samples.append([sum(each) for each in zip(*(resident(pid).values() for pid in family()), strict=True)])
        if not turn % 10:
            device.append(llm.collective_rpc(device_bytes)[0]["used"])
        turn += 1
    seconds = time.monotonic() - started
    del outs
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = [statistics.median(x[k] for x in late) - statistics.median(x[k] for x in early) for k in (0, 1)]
    peak = [max(x[k] for x in samples) for k in (0, 1)]
    mib = 1 << 20
    found |= {
        "seconds": round(seconds), "turns": turn, "rows": rows, "GB": round(rows * 8192 / 1e9),
        "own_MiB": [round(x[0] / mib) for x in samples[:: max(1, turn // 40)]],
        "shared_MiB": [round(x[1] / mib) for x in samples[:: max(1, turn // 40)]],
        "grown_MiB_second_to_last_quarter": {"own": round(grown[0] / mib, 1), "shared": round(grown[1] / mib, 1)},
        "peak_MiB": {"own": round(peak[0] / mib), "shared": round(peak[1] / mib)},
        "device_used_MiB": [round(x / mib) for x in device],
        "after": llm.collective_rpc(device_bytes)[0], "held": llm.collective_rpc("weir_usage")[0],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    assert found["before"]["weir"] <= found["buffer_bytes"] + (64 << 20), "more device memory than the setting says"
    assert grown[0] < 64 * mib and grown[1] < 64 * mib, "host memory grows"


if __name__ == "__main__":
    main()
