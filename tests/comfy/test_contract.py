"""Holds the double to the real host, and the real host to the recording that the double was written from."""

import json
import os
from pathlib import Path

import pytest

from .trace import trace

RECORDING = Path(__file__).parent / "fixtures" / "contract_0.33.json"


def facts_of(host) -> dict:
    return json.loads(json.dumps(trace(host)))


def test_host_keeps_the_recorded_contract(host):
    """Runs on both hosts: a fact that differs names itself."""
    found = facts_of(host)
    if host.is_real and os.environ.get("RECORD_CONTRACT"):
        RECORDING.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip("recorded the contract of the real ComfyUI")
    recorded = json.loads(RECORDING.read_text())
    different = {
        name: {"recorded": recorded.get(name), "this host": found.get(name)}
        for name in recorded.keys() | found.keys()
        if recorded.get(name) != found.get(name)
    }
    assert different == {}
