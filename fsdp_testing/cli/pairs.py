"""`fsdp-verify run NAME --pairs`: legal cases that contain every pair of traits, and the matrix of their results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.cli.fuzz import batches_at_a_time, campaigned, state_folder
from fsdp_testing.cli.outputs import checked_outputs, present
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.adapters.adapter import Adapter
    from fsdp_testing.report.terminal import Output
    from fsdp_testing.search.campaign.campaign import Plan
    from fsdp_testing.search.pairs.covering import Covering

WORLD_SIZES = (2, 3, 4)
SHRINK_SECONDS = 20.0


def execute(options: argparse.Namespace) -> int:
    """Judge every pair: 0 if each case passes or is a known failure, 1 if another case fails, 3 if one is unknown."""
    from fsdp_testing.adapters import registry
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.campaign.campaign import STATE_FILE
    from fsdp_testing.search.pairs.matrix import pairs_sheet, summary_of
    from fsdp_testing.search.state import changes, read_state, refuse

    _refuse_other_options(options)
    paths = checked_outputs(options)
    adapter = registry.load(options.names[0])
    console = open_console()
    covering, plan = _planned(options, adapter, console)
    tally = campaigned(plan, console)
    state = read_state(plan.state / STATE_FILE)
    refuse(plan.state / STATE_FILE, changes(plan.subject, state, plan.shard))  # of another process, on other cases
    if tally.found_before:
        console.say(f"as an earlier run found: {', '.join(sorted(tally.found_before))}")
    summary = summary_of(adapter.name, environment(), covering, state, tally)
    return present(pairs_sheet(summary), console, paths, {"--json": lambda: summary.to_json() + "\n"})


def _refuse_other_options(options: argparse.Namespace) -> None:
    other = {
        "--all": options.all,
        "--check": options.check,
        "--extended": options.extended,
        "--expected-failures": options.expected_failures,
        "--junit": options.junit,
        "--compare": options.compare,
        "--fault": options.fault,
        "--backend": options.backend != "gloo",
    }
    unwanted = [name for name, given in other.items() if given]
    if unwanted or len(options.names) != 1:
        raise InvalidArgument(
            f"run --pairs: expected one NAME, with --world-size, --tensor-parallel, --shard, --state, --jobs, --timeout, --html "
            f"or --json, got {', '.join([*options.names, *unwanted]) or 'none'}. Drop the rest."
        )


def _planned(options: argparse.Namespace, adapter: Adapter, console: Output) -> tuple[Covering, Plan]:
    from fsdp_testing.cases.drawing import Scope
    from fsdp_testing.checks.findings.known import shipped_known
    from fsdp_testing.report.progress import Display
    from fsdp_testing.search.campaign.campaign import Plan
    from fsdp_testing.search.pairs.covering import covering

    parts, shard = options.tensor_parallel, options.shard or (1, 1)
    sizes = options.world_size or tuple(size for size in WORLD_SIZES if size % parts == 0)
    scope = Scope(adapter.drawable(parts), sizes, tensor_parallel=parts)
    with Display(console) as display:
        display.stage("choosing legal cases that hold every pair of traits; this takes minutes")
        chosen = covering(scope)
    console.say(f"{len(chosen.traits)} traits; {len(chosen.cases)} cases hold every pair that legal cases can have")
    plan = Plan(
        adapter,
        scope,
        options.state or state_folder(Path(".fsdp-pairs"), options.names[0], shard, parts),
        seconds=None,
        lanes=batches_at_a_time(options.jobs, max(sizes)),
        deadline=options.timeout,
        shrink_seconds=SHRINK_SECONDS,
        known=shipped_known(adapter.built_on),
        shard=shard,
        listed=chosen.cases,
    )
    return chosen, plan
