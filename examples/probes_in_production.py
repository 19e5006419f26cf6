"""Probes on a server: kept under a name, in a stream, ending an answer, and scoring every request for the metrics.

python probes_in_production.py [URL ADMIN_KEY [API_KEY]]; without a URL it starts `weir serve` with the shipped model.
"""

import contextlib
import os
import random
import secrets
import subprocess
import sys
import time

import httpx

import vllm_weir as weir

WORDS = {"happy": "Tom was so happy and smiled .", "sad": "Tom was so sad and wept ."}
LAYER = 2
TEXT = "Tom went to the garden. Tom"


@contextlib.contextmanager
def own_server(key):
    port = random.randrange(20_000, 32_000)  # below the ports that outgoing connections get
    command = [sys.executable, "-m", "vllm_weir.cli", "serve", weir.demo_model(), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "67108864"]
    process = subprocess.Popen(command, env=os.environ | {"WEIR_ADMIN_KEY": key}, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def mood_probe(client):
    """A probe for the mood: the difference of two sentences' mean rows, 0.5 half way between them."""
    read = weir.Capture("resid_post", layers=LAYER, positions="prompt", reduce="mean")
    outs = client.generate(list(WORDS.values()), max_tokens=1, capture=read)
    happy, sad = (out.activations["resid_post", LAYER][0].float() for out in outs)
    weight = (happy - sad) / (happy - sad).norm() ** 2 * 8
    return weir.Probe("mood", weight, -float(weight @ (happy + sad)) / 2, layer=LAYER, activation="sigmoid")


def main(url, key, api_key=None):
    with weir.Client(url, api_key=api_key, admin_key=key) as client:
        probe = mood_probe(client)
        kept = client.probes.put("mood", probe, everyone=True, alert=0.5)
        print("kept:", kept["name"], kept["kind"], "at block", kept["layer"], "scores", kept["positions"])

        given = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for chunk in client.stream(TEXT, probes="mood", **given):
            if chunk.scores is not None:
                print(f"{chunk.text!r}: {[round(score, 3) for (score,) in chunk.scores['mood'].tolist()]}")
        highest = chunk.result.scores["mood"][1:].max().item()  # the first row is the prompt's last token
        print("highest:", round(highest, 3))

        stopped = client.generate(TEXT, stop_when=f"mood > {highest - 1e-3}", **given)
        print("stopped:", stopped.finish_reason, stopped.stop_reason, "after", len(stopped.token_ids), "tokens")

        plain = client.generate(TEXT, **given)
        print("a plain request has scores of its own:", plain.scores is not None)
        headers = {"Authorization": f"Bearer {api_key}"}
        lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
        print(*(line for line in lines if line.startswith("weir_probe") and "_total" in line), sep="\n")

        client.probes.delete("mood")
        print("left:", client.probes.list()["probes"])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:4])
    else:
        admin_key = secrets.token_hex(16)
        with own_server(admin_key) as address:
            main(address, admin_key)
