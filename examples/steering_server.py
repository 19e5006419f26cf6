"""Vectors by name, modules, and steering of every request on a server.

python steering_server.py [URL ADMIN_KEY [API_KEY]]; without a URL it starts `weir serve` with the shipped model.
"""

import base64
import contextlib
import os
import random
import secrets
import subprocess
import sys
import time

import httpx
from safetensors.torch import load

import vllm_weir as weir

WORDS = {"happy": "Tom was so happy and smiled .", "sad": "Tom was so sad and wept ."}
LAYER = 2


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


def main(url, key, api_key="none"):
    headers = {"X-Weir-Admin-Key": key, "Authorization": f"Bearer {api_key}"}
    client = httpx.Client(base_url=url, headers=headers, timeout=600)
    model = client.get("/v1/models").json()["data"][0]["id"]

    def call(method, path, **json):
        response = client.request(method, path, json=json)
        if response.status_code >= 400:
            print(response.json()["error"]["message"])
        return response.json() if response.content else {}

    def complete(prompt="Tom went to the garden. Tom", tokens=12, **site_request):
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"weir": {"v": 1, **site_request}} if site_request else {}
        return call("POST", "/v1/completions", **body)["choices"][0]

    # A direction: the mean row of one sentence minus that of another.
    capture = {"hook": "resid_post", "layers": [LAYER], "positions": "prompt", "reduce": "mean"}
    rows = {}
    for mood, text in WORDS.items():
        answer = complete(text, 1, capture=[capture])["weir"]["activations"]
        rows[mood] = load(base64.b64decode(answer["b64"]))[f"resid_post.{LAYER}"][0].float()
    happy = rows["happy"] - rows["sad"]

    print("kept:", call("PUT", "/v1/vectors/happy", vector=happy.tolist())["refs"])
    add = {"op": "add", "vector": {"ref": "happy"}, "layers": [LAYER], "scale": -2.0}
    print("plain:         ", complete()["text"])
    print("by name:       ", complete(interventions=[add])["text"])

    module = {"vectors": {"resid_post": {LAYER: {"vector": {"ref": "happy"}}}}}
    print("modules:", call("POST", "/v1/steering/modules/register", name="mood", **module)["modules"])
    print("as a module:   ", complete(modules=[{"name": "mood", "scale": -2.0}])["text"])

    entry = {"vector": {"ref": "happy"}, "scale": -2.0}
    print("set:", call("POST", "/v1/steering/set", vectors={"resid_post": {LAYER: entry}}))
    print("every request: ", complete()["text"])
    print("cleared:", call("POST", "/v1/steering/clear"))
    print("plain again:   ", complete()["text"])

    call("POST", "/v1/steering/set", vectors={"resid_post": {99: entry}})  # refused, and says why
    lines = client.get("/metrics").text.splitlines()
    print(*(line for line in lines if line.startswith("weir_") and "_total" in line), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:4])
    else:
        admin_key = secrets.token_hex(16)
        with own_server(admin_key) as address:
            main(address, admin_key)
