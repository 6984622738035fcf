"""`fsdp-verify plan`: the layout that the reference draws (`python -m fsdp_ref.plan`), also of the built-in models."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fsdp_ref.errors import FsdpError
from fsdp_ref.plan import command as reference
from fsdp_testing.cli.options import Command, Subparsers, declare
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    from torch import nn

EXAMPLE = "fsdp-verify plan llama-70b --world-size 64 --memory 80"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands, "plan", "show the shard layout of a model at any world size", reference.DESCRIPTION, example=EXAMPLE
    )
    reference.declare(command, "a model of `list models`, ")
    return command


def execute(options: argparse.Namespace) -> int:
    """Print the layout."""
    from fsdp_testing.cases.models import MODELS

    def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[str, ...]]:
        return MODELS[name].build(0, dtype), MODELS[name].units

    try:
        lines = list(reference.drawn(options, tuple(MODELS), build))
    except FsdpError as error:
        raise InvalidArgument(str(error)) from error
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
