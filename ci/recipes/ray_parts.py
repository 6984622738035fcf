"""How is one run divided over a Ray cluster? A task for each part, then `merge`: python ray_parts.py my_package:ADAPTER 8"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def judge(name: str, part: int, of: int) -> str:
    """Judge one part where Ray runs this, and return its report."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "part.json"
        # Exit code 1 says that a check failed; the whole is judged by `merge`.
        subprocess.run(["fsdp-verify", "run", name, "--shard", f"{part}/{of}", "--json", str(report)], check=False)
        return report.read_text(encoding="utf-8")


def main() -> int:
    """Divide, gather, merge; the exit code is that of one run."""
    import ray  # type: ignore[import-not-found, unused-ignore]  # installed where this is used

    name, of = sys.argv[1], int(sys.argv[2])
    task = ray.remote(num_cpus=4)(judge)
    reports = ray.get([task.remote(name, part, of) for part in range(1, of + 1)])
    paths = [Path(f"part-{part}.json") for part in range(1, of + 1)]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(report, encoding="utf-8")
    return subprocess.run(["fsdp-verify", "merge", *map(str, paths), "--html", "report"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
