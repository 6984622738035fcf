"""Checks a script's streams for races, in one more run on as many ranks that records them."""

from __future__ import annotations

from dataclasses import replace

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.check import guarded
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.report import Judgement
from fsdp_testing.train.running import Failed, Runner, Undecided


def judge_streams(runner: Runner, size: int) -> Judgement:
    """Judge the streams of a script on one number of ranks, whatever its numbers are: these show a race only sometimes."""

    def judge() -> Judgement:
        try:
            ranks = runner.reports(size, RunSettings(streams=True))
        except Failed as why:
            raise Undecided(
                f"does not finish while its streams are recorded, so they have no verdict: {why}",
                why.output,
            ) from why
        accounts = [rank.account for rank in ranks if rank.account is not None]
        for rank, account in enumerate(accounts):
            if account.races:
                raise Failed(
                    f"has {account.race_count} races on its streams, first: {account.races[0].summary}",
                    tuple(f"{account}".splitlines()),
                    subject=f"rank {rank}",
                )
        streams = {name: None for account in accounts for name in account.streams}
        if len(streams) < 2:
            raise Undecided(
                "uses the default stream alone, so there was nothing to check: it used no other stream "
                "(torch.get_device_module(device).Stream) and no collective that it waits for later. Waits inside C++, "
                "such as those of DDP's reducer, are not seen."
            )
        work = sum(account.work for account in accounts)
        sentence = f"{work} pieces of work on {', '.join(streams)}: each runs after the work that it depends on"
        return Judgement(size, Verdict.PASS, sentence)

    return replace(guarded(runner, size, judge), relation="--streams")
