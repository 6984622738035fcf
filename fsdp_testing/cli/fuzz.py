"""`fsdp-verify fuzz NAME`: search for divergences that no check covers."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.cli.museum import planted_bugs
from fsdp_testing.cli.options import (
    Command,
    Subparsers,
    add_jobs,
    add_old_spelling,
    add_seed,
    add_tensor_parallel,
    add_timeout,
    add_world_sizes,
    capacity_here,
    count,
    declare,
    part,
    path_of,
    seconds,
    warn_old_spelling,
)
from fsdp_testing.cli.outputs import present
from fsdp_testing.errors import HarnessError, InvalidArgument, PoolBroken

if TYPE_CHECKING:
    from fsdp_testing.adapters.adapter import Adapter
    from fsdp_testing.checks.findings.discovery import Discovery
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.terminal import Output
    from fsdp_testing.search.campaign.campaign import Plan
    from fsdp_testing.search.campaign.tally import CampaignTally

WORLD_SIZES = (2, 3)
DESCRIPTION = """\
Run random cases (module tree, wrapping plan, strategy, program of training operations) on ranks and compare each with a
single-process oracle. A new failure is shrunk and written to DIR/found/. A campaign continues where the last one in
DIR ended. Ctrl-C leaves everything on disk.
"""
EXAMPLE = "fsdp-verify fuzz torch-fsdp2 --seconds 300 --world-size 2,3"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "fuzz", "search for divergences with random cases", DESCRIPTION, example=EXAMPLE)
    command.add_argument("name", metavar="NAME", nargs="?", help="implementation")
    limit = command.add_argument_group("how long")
    limit.add_argument("--seconds", type=seconds, metavar="N", help="end after N seconds (default 60)")
    limit.add_argument("--examples", type=count, metavar="N", help="end after drawing N cases")
    limit.add_argument("--stop-at-first", action="store_true", help="end with the first confirmed finding")
    what = command.add_argument_group("what is drawn")
    add_seed(what, "determines all random choices")
    add_world_sizes(what, "numbers of ranks, the usual one first (default 2,3; with tensor parallelism 2)")
    add_tensor_parallel(what)
    what.add_argument("--max-operations", type=count, default=12, metavar="N", help="longest program (default 12)")
    what.add_argument(
        "--without", action="append", default=[], metavar="FEATURE", help="never draw this (tree.tied, op.clip, ...)"
    )
    what.add_argument(
        "--known",
        type=path_of,
        action="append",
        default=[],
        metavar="FILE",
        help="more known failures: rules (JSON) or defects (TOML)",
    )
    what.add_argument(
        "--no-known", action="store_true", help="also report the known failures that ship with fsdp-testing"
    )
    what.add_argument(
        "--shard", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts of the cases, for `merge`"
    )
    what.add_argument("--exhibits", type=count, metavar="N", help=argparse.SUPPRESS)
    where = command.add_argument_group("where")
    where.add_argument("--state", type=path_of, metavar="DIR", help="default: .fsdp-fuzz/NAME in the current directory")
    add_old_spelling(where, "--lanes", add_jobs(where, "batches"))
    add_old_spelling(where, "--deadline", add_timeout(where, 30.0))
    where.add_argument("--no-scripts", action="store_true", help="do not run the scripts of findings at the end")
    return command


def execute(options: argparse.Namespace) -> int:
    """Run a campaign: 0 if every case passed or is a known failure, 1 if another case failed, 3 if a case is unknown."""
    if options.exhibits is not None and options.name is None:
        warn_old_spelling("fuzz --exhibits", "museum --exhibits")
        limit = ["--cases", str(options.examples)] if options.examples else []
        hunted = ["--exhibits", str(options.exhibits), "--seed", str(options.seed), *limit]
        return planted_bugs([*hunted, "--seconds", str(options.seconds or 60.0)])
    if options.name is None or options.exhibits is not None:
        raise InvalidArgument(
            "fuzz: expected NAME. Name the implementation to fuzz; for exhibits: `museum --exhibits N`."
        )
    from fsdp_testing.adapters import registry
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.campaign.tally import campaign_sheet

    adapter = registry.load(options.name)
    plan = _plan(options, adapter)
    console = open_console()
    tally = campaigned(plan, console, scripts=not options.no_scripts)
    return present(campaign_sheet(tally, adapter.name, plan.state), console, {}, {})


def not_drawn(plan: Plan) -> list[str]:
    """Return the features that no case of a plan uses, with the reason."""
    adapter, missing = plan.implementation, plan.scope.not_claimed()
    undrawable = adapter.claimed(plan.scope.tensor_parallel) - adapter.drawable(plan.scope.tensor_parallel)
    lines = []
    if missing:
        features = f"{len(missing)} features are not drawn, because {adapter.name} does not claim them"
        lines.append(f"{features}: {', '.join(sorted(missing))}")
    if undrawable:
        lines.append(
            f"{adapter.name} does claim some of these ({', '.join(sorted(undrawable))}): they are judged by gradients, which its "
            "adapter does not show. Give it local_pieces."
        )
    return lines


def campaigned(plan: Plan, console: Output, *, scripts: bool = True) -> CampaignTally:
    """Run a campaign, print each finding as it comes, and run their scripts at the end; return the counts."""
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.terminal import print_sheet
    from fsdp_testing.search.campaign.campaign import Campaign
    from fsdp_testing.search.campaign.tally import campaign_sheet
    from fsdp_testing.search.state import held

    for line in not_drawn(plan):
        console.say(line, style="dim")
    with held(plan.state), Display(console, "cases") as display:
        findings = _Findings(display)
        display.stage("starting ranks, then running cases")
        campaign = Campaign(plan, default_pool(), findings.progress, findings.found)
        try:
            tally = campaign.run()
        except (KeyboardInterrupt, PoolBroken) as end:
            how = "interrupted" if isinstance(end, KeyboardInterrupt) else "ended early"
            console.say(f"{how}; all results so far are in {plan.state}")
            print_sheet(campaign_sheet(campaign.tally, plan.implementation.name, plan.state), console)
            raise
    if scripts:
        _try_scripts(console, findings.folders)
    return tally


def batches_at_a_time(asked: int | None, largest: int) -> int:
    """Return how many batches to have under way, whose largest world has `largest` ranks; usually half the processors.

    Raises:
        InvalidArgument: More were requested than there is room for.
    """
    room = capacity_here(largest)
    return room.jobs(asked, max(2, room.processors // 2))


def state_folder(home: Path, name: str, shard: tuple[int, int], tensor_parallel: int) -> Path:
    """Return the default folder of a campaign."""
    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    folder += "-shard-{}-of-{}".format(*shard) if shard != (1, 1) else ""
    folder += f"-tensor-parallel-{tensor_parallel}" if tensor_parallel > 1 else ""
    return home / folder


def _plan(options: argparse.Namespace, adapter: Adapter) -> Plan:
    from fsdp_testing.base.document import read_text
    from fsdp_testing.cases.drawing import Scope
    from fsdp_testing.checks.findings.known import read_rules, shipped_known
    from fsdp_testing.judging.known import joined
    from fsdp_testing.search.campaign.campaign import Plan

    known = [] if options.no_known else [shipped_known(adapter.built_on)]
    for path in options.known:
        text = read_text(path, "a file of known failures for --known", "Give another file.")
        known.append(read_rules(text, str(path), adapter.built_on))
    limit = options.seconds if options.seconds or options.examples else 60.0
    parts = options.tensor_parallel
    sizes = options.world_size or (WORLD_SIZES if parts == 1 else WORLD_SIZES[:1])
    drawn = (sizes, options.max_operations, frozenset(options.without), parts)
    return Plan(
        implementation=adapter,
        scope=Scope(adapter.drawable(parts), *drawn),
        state=options.state or state_folder(Path(".fsdp-fuzz"), options.name, options.shard, parts),
        seconds=limit,
        examples=options.examples,
        seed=options.seed,
        lanes=batches_at_a_time(options.jobs, max(sizes)),
        deadline=options.timeout,
        known=joined(known),
        stop_at_first=options.stop_at_first,
        shard=options.shard,
    )


class _Findings:
    """Prints each finding as it comes, and the progress of the campaign."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.folders: list[Path] = []

    def progress(self, tally: CampaignTally) -> None:
        text = f"{tally.rate:.0f}/s, {sum(tally.known.values())} known, {len(tally.discovered)} findings"
        self._display.at(tally.run, text)

    def found(self, discovery: Discovery, state: Path) -> None:
        from fsdp_testing.search.campaign.writing import write_discovery

        folder, console = write_discovery(discovery, state), self._display.console
        self.folders.append(folder)
        console.say(("" if discovery.confirmed else "(once, not again alone) ") + discovery.sentence())
        again = shlex.join(["fsdp-verify", "replay", str((folder / "finding.json").resolve())])
        console.say(f"  {folder}; run it again: {again}")


def _try_scripts(console: Output, folders: list[Path]) -> None:
    from fsdp_testing.search.campaign.writing import SCRIPT, try_script

    for folder in folders:
        try:
            reproduces = try_script(folder)
        except OSError as error:
            raise HarnessError(f"{folder / SCRIPT}: expected a script that can be run, got {error}.") from error
        if reproduces is not None:
            verb = "reproduces with torch alone" if reproduces else "does not reproduce it"
            console.say(f"{folder / SCRIPT} {verb}")
