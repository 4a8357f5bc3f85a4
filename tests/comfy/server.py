"""A real ComfyUI server in a process of its own, with its own base directory, and a small client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

from . import pack as pack_module

TEXT_EVENT = 3
# Another page than the one this ComfyUI pins: the folder `static` of an unpacked comfyui-frontend-package.
FRONT_END_ROOT = os.environ.get("FRONT_END_ROOT", "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """Starts main.py; its custom_nodes are the pack, under a hyphenated folder, and the test conditioning."""

    def __init__(self, comfyui: Path, base: Path, models: Path):
        self.base, self.port = base, free_port()
        for name in ("models", "input", "output", "temp", "user"):
            (base / name).mkdir(parents=True, exist_ok=True)
        shutil.copytree(models, base / "models", dirs_exist_ok=True)
        self.pack = pack_module.copy_pack(base / "custom_nodes", "comfyui-vc-attention")
        shutil.copytree(
            Path(__file__).parent / "fixtures" / "test-conditioning", base / "custom_nodes" / "test-conditioning"
        )
        self.log_path = base / "server.log"
        command = [sys.executable, str(comfyui / "main.py"), "--cpu", "--listen", "127.0.0.1"]
        command += ["--port", str(self.port), "--base-directory", str(base), "--disable-auto-launch"]
        command += ["--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        if FRONT_END_ROOT:
            command += ["--front-end-root", FRONT_END_ROOT]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # a user starts main.py without them
            environment.pop(name, None)
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=base, env=environment)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_up(self, seconds=120):
        import urllib.error
        import urllib.request

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                with urllib.request.urlopen(f"http://{self.address}/system_stats", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise TimeoutError(f"ComfyUI did not answer in {seconds} s:\n{self.log()[-4000:]}")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str):
        return asyncio.run(self._get(path))

    async def _get(self, path):
        import aiohttp

        async with aiohttp.ClientSession() as session, session.get(f"http://{self.address}{path}") as answer:
            body = await answer.read()
            is_json = "json" in answer.headers.get("Content-Type", "")
            return answer.status, json.loads(body) if is_json else body

    def send(self, path: str, body: dict):
        """POST a body; the status and the answer."""
        return asyncio.run(self._send(path, body))

    async def _send(self, path, body):
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{self.address}{path}", json=body) as answer,
        ):
            return answer.status, await answer.json()

    def post(self, prompt: dict):
        """POST a prompt without waiting for it."""
        return asyncio.run(self._post_only(prompt))

    async def _post_only(self, prompt):
        import aiohttp

        async with aiohttp.ClientSession() as session:
            return await self._post(session, prompt, uuid.uuid4().hex)

    async def _post(self, session, prompt, client):
        body = {"prompt": prompt, "client_id": client}
        async with session.post(f"http://{self.address}/prompt", json=body) as answer:
            return answer.status, await answer.json()

    def run(self, prompt: dict, interrupt_after: int | None = None, seconds=120) -> Run:
        """Queue a prompt, listen until it ends; with ``interrupt_after`` press cancel at that sampler step."""
        return asyncio.run(asyncio.wait_for(self._run(prompt, interrupt_after), seconds))

    async def _run(self, prompt, interrupt_after):
        import aiohttp

        client, run = uuid.uuid4().hex, Run()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{self.address}/ws?clientId={client}") as socket_,
        ):
            run.client = client
            status, answer = await self._post(session, prompt, client)
            if status != 200:
                raise RuntimeError(f"the prompt was refused: {answer}")
            run.id = answer["prompt_id"]
            async for message in socket_:
                if message.type == aiohttp.WSMsgType.BINARY:
                    run.take_binary(message.data)
                    continue
                if message.type != aiohttp.WSMsgType.TEXT:
                    break
                event = json.loads(message.data)
                kind, data = event["type"], event.get("data") or {}
                run.events.append(kind)
                if kind == "progress" and interrupt_after is not None and data["value"] >= interrupt_after:
                    interrupt_after = None
                    await session.post(f"http://{self.address}/interrupt", json={})
                if kind in ("execution_error", "execution_interrupted", "execution_success"):
                    run.ending, run.data = kind, data
                    break
            for _ in range(100):  # the history is written a moment after the last message
                _, history = await self._get(f"/history/{run.id}")
                if run.id in history:
                    run.history = history[run.id]
                    break
                await asyncio.sleep(0.1)
        return run

    def latent(self, run: Run):
        """The tensor that the prompt's SaveLatent wrote."""
        import safetensors.torch

        for output in run.history["outputs"].values():
            for saved in output.get("latents", []):
                path = self.base / "output" / saved.get("subfolder", "") / saved["filename"]
                return safetensors.torch.load_file(str(path))["latent_tensor"]
        raise FileNotFoundError(f"no latent in {run.history['outputs']}")


class Run:
    """What one prompt did."""

    def __init__(self):
        self.id, self.client, self.ending, self.data, self.history = None, None, None, {}, None
        self.events: list[str] = []
        self.texts: list[tuple[str, str]] = []

    def take_binary(self, data: bytes):
        (kind,) = struct.unpack(">I", data[:4])
        if kind == TEXT_EVENT:
            (length,) = struct.unpack(">I", data[4:8])
            self.texts.append((data[8 + length :].decode(), data[8 : 8 + length].decode()))


def summary_lines(log: str) -> list[str]:
    """Our lines in the server's log."""
    return [line for line in log.splitlines() if re.search(r"VC Attention", line)]
