"""A flipped bit in a file of torch.save, or in a directory of dcp, loads as another number; the checksum is there.

Run with torch alone: python load-ignores-checksums.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

ONES = torch.full((64,), 1.0)
PATTERN = b"\x00\x00\x80\x3f" * 8  # eight times 1.0 in memory


def flip(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[data.find(PATTERN) + 3] ^= 0x80
    Path(path).write_bytes(data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"weight": ONES}, f"{folder}/state.pt")
        flip(f"{folder}/state.pt")
        of_file = torch.load(f"{folder}/state.pt", weights_only=True)["weight"]
        dcp.save({"weight": ONES}, checkpoint_id=f"{folder}/directory", no_dist=True)
        flip(f"{folder}/directory/__0_0.distcp")
        loaded = {"weight": torch.zeros(64)}
        dcp.load(loaded, checkpoint_id=f"{folder}/directory", no_dist=True)
        print(f"saved 1.0; loaded {of_file[0].item()} from the file, {loaded['weight'][0].item()} from the directory")
        assert of_file[0] == -1, "fixed in this torch"
        assert loaded["weight"][0] == -1, "fixed in this torch"
