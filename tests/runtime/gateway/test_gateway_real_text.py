"""The gateway with a real model's tokenizer and chat template, in a process of its own: right ids, no torch, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.torch_tp.checkpoint import CheckpointError
from runtime.torch_tp.model_folder import find_model
from runtime.torch_tp.tokenizer import load_tokenizer

PROGRAM = """
import asyncio, json, sys
import httpx
from runtime.calls import Piece
from runtime.gateway.app import make_app
from runtime.gateway.interface import ServedModel
import runtime.gateway.server
from runtime.torch_tp.requests import TokenLogprobs

class Echo:
    # answers with the prompt's own tokens, each with its logprob
    def models(self): return {"smollm2": ServedModel("smollm2", 2048, "smollm2")}
    def status(self): return ()
    async def is_ready(self): return True
    async def run(self, call):
        self.call = call
        for place, token in enumerate(call.prompt_ids):
            yield Piece(place, token, "", TokenLogprobs(-1.0))
        yield Piece(len(call.prompt_ids), None, "", None, "stop", len(call.prompt_ids), len(call.prompt_ids))

async def main():
    echo = Echo()
    app = make_app(echo)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            chat = {"model": "smollm2", "messages": [{"role": "user", "content": TEXT}], "logprobs": True, "max_tokens": 9}
            said = (await client.post("/v1/chat/completions", json=chat)).json()
            ids = echo.call.prompt_ids
            long = await client.post("/v1/completions", json={"model": "smollm2", "prompt": "word " * 2048, "max_tokens": 1})
            huge = await client.post("/v1/completions", json={"model": "smollm2", "prompt": "x" * 3_000_000, "max_tokens": 1})
    print(json.dumps({
        "ids": ids, "tokens": [entry["bytes"] for entry in said["choices"][0]["logprobs"]["content"]],
        "codes": [long.json()["error"]["code"], huge.json()["error"]["code"]],
        "loaded": [name for name in ("torch", "gymnasium", "simpy", "stable_baselines3", "transformers") if name in sys.modules],
        "peak_mib": int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024,
    }))

asyncio.run(main())
"""
TEXT = "Gravitation für 你好 🙂?"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_real_tokenizer_and_template():
    """Ids as the tokenizer's own template gives them; the tokens' bytes put together are the prompt; prompts that cannot fit are 400."""
    try:
        find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    program = f"TEXT = {TEXT!r}\n{PROGRAM}"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    tokenizer = load_tokenizer("smollm2")
    messages = [{"role": "user", "content": TEXT}]
    assert said["ids"] == tokenizer.apply_chat_template(messages)
    assert b"".join(map(bytes, said["tokens"])).decode() == tokenizer.chat_text(messages)
    assert said["codes"] == ["context_length_exceeded"] * 2
    assert said["loaded"] == []
    assert said["peak_mib"] < 130  # with a test client and its 3 MB body in it; the bar for the gateway is 120
