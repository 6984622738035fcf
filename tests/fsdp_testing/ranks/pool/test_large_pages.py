"""Memory is moved into large pages where the kernel can, and nothing happens where it cannot."""

from __future__ import annotations

import subprocess
import sys

from fsdp_testing.ranks.pool.large_pages import _private_memory, collapse

MB = 1 << 20
# Fills 16 MB by small pages; a large page inside it shows in the kernel's own account.
MEASURE = """
import mmap
from fsdp_testing.ranks.pool.large_pages import collapse
def large():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps") if l.startswith("AnonHugePages"))
block = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(block), mmap.PAGESIZE):
    block[at] = at // mmap.PAGESIZE % 251
before = large()
agreed = collapse()
assert all(block[at] == at // mmap.PAGESIZE % 251 for at in range(0, len(block), mmap.PAGESIZE))
print(agreed, large() - before)
"""


def test_only_whole_large_pages_of_private_memory() -> None:
    listing = "\n".join(
        [
            f"{3 * MB:x}-{9 * MB:x} rw-p 00000000 00:00 0",
            f"{20 * MB:x}-{24 * MB:x} rw-p 00000000 00:00 0 [heap]",
            f"{30 * MB:x}-{40 * MB:x} rw-p 00001000 08:01 17 /usr/lib/x.so",
            f"{50 * MB:x}-{60 * MB:x} r--p 00000000 00:00 0",
            f"{70 * MB:x}-{80 * MB:x} rw-s 00000000 00:00 0",
            f"{90 * MB:x}-{94 * MB:x} rw-p 00000000 00:00 0 [stack]",
            f"{101 * MB:x}-{103 * MB:x} rw-p 00000000 00:00 0",
        ]
    )
    assert list(_private_memory(listing)) == [4 * MB, 6 * MB, 20 * MB, 22 * MB]


def test_the_kernel_agrees_or_says_no() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60)
    agreed, grown_kb = map(int, done.stdout.split())
    # The kernel's account and the count of agreed pages are two witnesses; pages may have been large before.
    assert (agreed > 0) == (grown_kb > 0)
    assert grown_kb <= agreed * 2048


def test_an_unreadable_map_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("gone")))
    assert collapse() == 0
