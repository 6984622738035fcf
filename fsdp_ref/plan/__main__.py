"""`python -m fsdp_ref.plan`: 0 when the layout was drawn, 2 for bad usage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp_ref.errors import FsdpError
from fsdp_ref.plan.command import DESCRIPTION, declare, drawn


def main() -> int:
    """Draw a layout, or say in one sentence why not."""
    parser = argparse.ArgumentParser("python -m fsdp_ref.plan", description=DESCRIPTION, allow_abbrev=False)
    declare(parser)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # names may hold what it cannot show
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        sys.stdout.write("".join(f"{line}\n" for line in drawn(parser.parse_args())))
    except FsdpError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


sys.exit(main())
