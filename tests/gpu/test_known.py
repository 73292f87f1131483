"""What the driver says without torch is what torch says."""

import json
import subprocess
import sys

import torch

from trimtab.machine import gpus, machine_cache

MIB = 2**20
CODE = """
import json, sys
from dataclasses import asdict
from trimtab.machine.gpus import read_gpus
cards = read_gpus()
assert "torch" not in sys.modules
print(json.dumps([asdict(card) for card in cards]))
"""


def test_the_driver_counts_and_names_gpus_as_torch_does():
    child = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    cards = json.loads(child.stdout)
    assert len(cards) == torch.cuda.device_count()
    for index, card in enumerate(cards):
        properties = torch.cuda.get_device_properties(index)
        assert card["name"] == torch.cuda.get_device_name(index)
        assert tuple(card["capability"]) == (properties.major, properties.minor)
        assert card["multiprocessors"] == properties.multi_processor_count
        assert card["total_bytes"] == properties.total_memory


def test_free_memory_is_what_the_driver_has_given_nobody():
    torch.empty(1, device="cuda:0")
    free, _ = torch.cuda.mem_get_info(0)
    assert abs(gpus.read_gpus()[0].free_bytes - free) < 128 * MIB


def test_torch_is_asked_where_it_is_loaded():
    assert machine_cache.find_machine("cuda:0") is None
