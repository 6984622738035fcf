"""The ranks' shares of the rows: overlaps and losses are found; padding, dropping, drawing and streams are no mistake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fsdp_testing.train.batches import row_digests
from fsdp_testing.train.causes import of_same_rows
from fsdp_testing.train.loaders import LoaderSeen, Pass
from fsdp_testing.train.rows import prepared_apart, strange_shares, taken_elsewhere, unknown_shares


def run(*ranks, steps=(), due=2, indices=None, dataset=(), **options):
    """Return a run whose ranks take these rows in the one pass over a loader of two rows an item, and those in its steps."""
    taken = zip(ranks, indices or [""] * len(ranks))
    passes = [Pass(rows=list(rows), indices=list(given), **{"complete": True} | options) for rows, given in taken]
    loaders = [LoaderSeen(passes=[one], batch=2, due=due, dataset=dataset) for one in passes]
    seen = [SimpleNamespace(taken=SimpleNamespace(loaders=[loader] if ranks[0] else [])) for loader in loaders]
    return SimpleNamespace(size=len(ranks), ranks=seen, steps=len(steps), union=lambda step: Counter(steps[step]))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (("ace", "bde"), {}),  # padded by one row
        (("ac", "bd"), {}),  # dropped: of five rows the last
        (("aaaa", "aaaa"), {"due": None, "complete": False}),  # a stream that begins anew
        (("ac", "bd"), {"complete": False}),
        (("aca", "bcd"), {"complete": False}),  # drawn, by a sampler of the script's own
    ],
)
def test_what_samplers_and_streams_do_is_no_mistake(ranks, options):
    assert strange_shares(run("abcde", **options), run(*ranks, **options)) == ""


@pytest.mark.parametrize(
    ("ranks", "complete", "message"),
    [
        (
            ("abcd", "cdef"),
            True,
            "in pass 0 over a DataLoader 2 of the rows that one process takes are taken by no rank and 2 of",
        ),
        (("abcdab", "efghcd"), True, "DataLoader 4 of the rows that the ranks take were taken before"),
        (("abc", "bde"), False, "in pass 0 over a DataLoader 1 of the rows that the ranks take were taken before"),
        (
            ("a", "b"),
            True,
            "6 of the rows that one process takes are taken by no rank. Cause: the shares of the ranks overlap or",
        ),
    ],
)
def test_shares_of_a_pass_that_overlap_or_leave_rows_out_are_found(ranks, complete, message):
    assert message in strange_shares(run("abcdefgh"), run(*ranks, complete=complete))


def test_a_step_of_rows_that_no_rank_takes_is_no_last_batch():
    def of(*ranks, **options):
        return run(*ranks, indices=ranks, dataset=("12", "digest of row 0"), **options)

    alone = of("abcdefghijkl", steps=("ab", "cd"))
    lost = strange_shares(alone, of("abcd", "ghij", steps=("abgh", "cdij")))
    assert "4 of the rows that one process takes are taken by no rank" in lost
    assert strange_shares(alone, of("abcd", "ghijk", steps=("abgh", "cdij"))) == "", "3 rows: the last, dropped"
    uneven = of("abcd", "ghij", steps=("abgh", "cdij"))
    uneven.ranks[0].taken.loaders[0].passes[0].sizes = [1, 3, 1]
    assert strange_shares(alone, uneven) == "", "batches of a budget, of which the last may be the largest"
    accumulated = of("abcd", "ghij", steps=("abcdghij",))
    assert strange_shares(alone, accumulated) == "", "half a step, which one process makes and ranks drop"


def test_ranks_of_one_group_that_take_the_same_rows_are_named():
    world = SimpleNamespace(size=4, rows=[[("a",), ("b",), ("a",), ("b",)]])
    assert "ranks 0, 2, and ranks 1, 3 train on the same rows at every step (1 at step 0): each is seen 2 times" in (
        of_same_rows(world, 2)
    )


def test_a_rank_may_load_the_batch_of_all_ranks_and_take_its_slice():
    alone, both = run("abcdefgh", steps=("abcd", "efgh")), ("abcdefgh", "abcdefgh")
    assert strange_shares(alone, run(*both, steps=("abcd", "efgh"))) == ""
    assert strange_shares(alone, run(*both, steps=("ijkl", "mnop"))) == "", "rows that it changes before forward"
    assert strange_shares(alone, run(*both, steps=("abc", "efg"))) == "", (
        "uneven slices: their rows are counted elsewhere"
    )
    overlap = "8 of the rows that the ranks take were taken before"
    assert overlap in strange_shares(alone, run(*both, steps=("ijklijkl", "mnopmnop"))), "it takes all of them"
    smaller = run(*both, steps=("ijkl", "mnop"))
    for rank in smaller.ranks:
        rank.taken.loaders[0].batch = 1
    assert overlap in strange_shares(alone, smaller), "it loads the share of a rank, of no sampler"


def stepwise(*ranks):
    """Return a run whose ranks take a row at each step."""
    return SimpleNamespace(size=len(ranks), rows=[[[row] for row in step] for step in zip(*ranks)])


def test_rows_that_several_ranks_take_though_none_takes_one_twice_are_no_chance():
    alone = stepwise("abcdefghijkl")
    assert "11 of the rows that the ranks take" in taken_elsewhere(
        alone, stepwise("abcdefghijkl", "lbcdefghijka"[:11] + "z")
    )
    assert taken_elsewhere(alone, stepwise("abcdefghijkl", "mnopqrstuvwa")) == ""  # a few by chance
    assert taken_elsewhere(alone, stepwise("abcdefghijka", "lbcdefghijka")) == ""  # drawn with replacement
    assert taken_elsewhere(stepwise("abcdefghijka"), stepwise("abcdefghijkl", "lbcdefghijka")) == ""  # a short pass


def test_a_batch_that_two_ranks_take_is_no_chance():
    def batches(*ranks):
        return SimpleNamespace(size=len(ranks), rows=[[[*batch] for batch in step] for step in zip(*ranks)])

    alone = batches(["abcdefgh", "ijklmnop"])
    assert "4 of the rows that the ranks take" in taken_elsewhere(alone, batches(["abcd", "efgh"], ["efgh", "ijkl"]))
    assert taken_elsewhere(alone, batches(["abcd", "efgh"], ["fehg", "ijkl"])) == ""  # in another order, by chance
    assert taken_elsewhere(alone, batches("ab", "bc")) == ""  # batches of one row


def test_rows_that_no_loader_gives_are_told_where_they_are_not_those_of_one_process():
    alone = run("", steps=("abcd", "efgh"))
    assert unknown_shares(alone, run("", "", steps=("abcd", "efgh"))) == ()
    assert (
        "4 of the 8 that the ranks take are none of one process"
        in unknown_shares(alone, run("", "", steps=("abxy", "efzw")))[0]
    )


def test_rows_of_a_step_are_lost_or_drawn():
    alone, slices = run("", steps=("abcd", "efgh")), run("", "", steps=("abbc", "effg"))
    assert strange_shares(alone, slices).startswith(
        "at step 0 1 of the rows that one process takes are taken by no rank and 1 of"
    )
    assert strange_shares(alone, run("", "", steps=("abcd", "hgfe"))) == ""
    assert strange_shares(alone, run("", "", steps=("abcdefgh", "ijklmnop"))) == ""  # batches of a rank's own size
    assert (
        strange_shares(run("", steps=("aabc", "ccde")), run("", "", steps=("abbc", "deee"))) == ""
    )  # drawn of few rows


AUGMENTED = {"dataset": ("8", "digest of row 0"), "due": 2}


def test_rows_that_are_drawn_anew_are_known_by_their_indices():
    """Every row has another digest in each run."""
    alone = run("abcdefgh", indices=["01234567"], **AUGMENTED)
    right = run("klmn", "opqr", indices=["0246", "1357"], **AUGMENTED)
    assert strange_shares(alone, right) == "" and unknown_shares(alone, right) == ()
    overlapping = run("klmn", "opqr", indices=["0123", "2345"], **AUGMENTED)
    assert "2 of the rows that one process takes are taken by no rank and 2 of" in strange_shares(alone, overlapping)


def test_a_pass_that_was_not_ended_is_judged_by_what_its_sampler_would_have_given():
    begun = AUGMENTED | {"complete": False, "planned": True}
    alone, twice = run("ab", indices=["01234567"], **begun), run("kl", "mn", indices=["01234567"] * 2, **begun)
    assert "8 of the rows that the ranks take were taken before" in strange_shares(alone, twice)
    assert strange_shares(alone, run("kl", "mn", indices=["0246", "1357"], **begun)) == ""


@pytest.mark.parametrize("dataset", [("4", "of rank 0"), ()])
def test_indices_into_other_data_say_nothing(dataset):
    """Ranks that split the data themselves take indices from 0 on, and each means rows of its own."""
    alone = run("abcdefgh", indices=["01234567"], **AUGMENTED)
    split = run("klmn", "opqr", indices=["0123", "0123"], dataset=dataset)
    assert strange_shares(alone, split) == ""
    assert [sentence.startswith("not compared: how the ranks share") for sentence in unknown_shares(alone, split)] == [
        True
    ]
    # Rows that one process takes too are known by their digests, augmented or not.
    assert "4 of the rows that one process" in strange_shares(alone, run("abcd", "abcd", indices=["0123"] * 2))
    assert unknown_shares(alone, run("aceg", "bdfh", indices=["0123"] * 2)) == ()


def test_rows_of_a_validation_may_be_taken_by_every_rank():
    def with_validation(*shares, held_out="xyzuvw"):
        one = run(*shares)
        for rank in one.ranks:
            rank.taken.loaders[0].passes[0].trained = 2
            rank.taken.loaders.append(LoaderSeen(passes=[Pass(rows=list(held_out), complete=True)], batch=2, due=3))
        return one

    assert strange_shares(with_validation("abcdefgh"), with_validation("aceg", "bdfh")) == ""
    assert "4 of the rows that one process" in strange_shares(
        with_validation("abcdefgh"), with_validation("abcd", "abcd")
    )


def passes(*orders, **options):
    defaults = {"complete": True, "epoch": 0}
    return LoaderSeen(passes=[Pass(indices=list(order), **defaults | options) for order in orders])


def test_only_passes_of_the_training_are_compared_in_their_order():
    assert passes("0213", "0213").repeats_order == "is not called"
    assert passes("0213", "0213", epoch=None).repeats_order == ""  # nothing shuffles by epoch
    assert passes("0", "0").repeats_order == ""
    peeked = passes("0213", "02", "0213")
    peeked.passes[1].complete, peeked.passes[2].epoch = False, 1
    assert peeked.repeats_order == ""  # a look at the first batch, before set_epoch
    for own_pass in peeked.passes:
        own_pass.trained = 2
    assert peeked.repeats_order == "is not called"
    evaluated = passes("0213", "0213")
    evaluated.passes[0].trained = 2
    assert evaluated.repeats_order == ""
    again = passes("0213", "0213")
    again.passes[0].epoch_calls, again.passes[1].epoch_calls = 1, 2
    assert again.repeats_order == "is called with 0 again"


def test_each_row_of_a_large_batch_has_a_digest():
    assert len(set(row_digests(torch.arange(8193.0)[:, None]))) == 8193


def prepared(rows, digest):
    """Return a run of two ranks, or one, of which rank 0's dataset begins with these rows."""
    loaders = [LoaderSeen(dataset=(str(len(rows)), digest), first_rows=list(rows)) for _ in range(2)]
    ranks = [SimpleNamespace(taken=SimpleNamespace(loaders=[loader], marks=[])) for loader in loaders]
    return SimpleNamespace(size=2, ranks=ranks)


def test_a_share_that_is_scaled_by_its_own_statistic_is_known_however_it_is_divided():
    rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)).double()
    for share in (rows[:12], rows[::2]):
        for own in (
            (share - share.mean(0)) / share.std(0),
            share - share[:4].mean(0),
            share * torch.tensor([1, 1, 2.5]),
        ):
            assert "each rank's own statistic" in prepared_apart(
                prepared(rows, "a"), prepared(own.float().double(), "b")
            )
        others = (
            share,
            share.flip(0),
            torch.randn(12, 3).double(),
            share + torch.randn(12, 3) / 100,
            share.exp(),
            share * 0,
        )
        for other in (*others, share[:3] * 2, []):
            assert prepared_apart(prepared(rows, "a"), prepared(other, "b")) == ""


def in_blocks(rows, length):
    """Return each second block of so many rows, from the first and from the second block on."""
    blocks = rows.split(length)
    return torch.cat(blocks[::2]), torch.cat(blocks[1::2])


def test_a_share_of_blocks_that_is_scaled_or_numbered_by_its_own_statistic_is_known():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(96, 3, generator=generator).double()
    words = torch.randint(0, 15, (96, 5), generator=generator)
    labels = (rows.sum(1, keepdim=True) > 0).double()
    for length in (2, 4, 8, 16):
        for whole, fit in ((rows, lambda share: (share - share.mean(0)) / share.std(0)), (words.double(), numbered)):
            first, last = (fit(share) for share in in_blocks(whole, length))
            alone = edges(fit(whole)[:64], fit(whole).flip(0)[:64])
            assert "each rank's own statistic" in prepared_apart(alone, edges(first, last.flip(0)))
            first, last = in_blocks(fit(whole), length)
            assert prepared_apart(alone, edges(first, last.flip(0))) == ""
        advantages = rows[:, :1]
        kept = torch.cat([rows[:, 1:], labels], 1)
        first = torch.cat([in_blocks(kept, length)[0], in_blocks(advantages, length)[0] * 1.1 - 0.05], 1)
        assert "each rank's own statistic" in prepared_apart(edges(torch.cat([kept, advantages], 1)[:64]), edges(first))


def test_the_first_file_of_a_share_tells_whatever_its_length():
    rows = torch.randn(96, 3, generator=torch.Generator().manual_seed(5)).double()
    share = torch.cat([rows[:13], rows[40:61], rows[70:81]])
    assert "each rank's own statistic" in prepared_apart(
        edges(rows[:64]), edges((share - share.mean(0)) / share.std(0))
    )
    assert prepared_apart(edges(rows[:64]), edges(share)) == ""


def test_numbers_that_follow_from_places_are_no_statistic_of_a_share():
    rows = torch.arange(96.0).double()[:, None] / 100
    for share in (rows[::2], rows[:48], torch.cat(rows.split(8)[::2])):
        assert prepared_apart(edges(rows[:64]), edges(share)) == ""


def numbered(share):
    """Return the rows with each word's number in the order of first use."""
    known = {}
    for word in share.reshape(-1).tolist():
        known.setdefault(word, len(known))
    return torch.tensor([[known[word] for word in row] for row in share.tolist()]).double()


def edges(first, last=()):
    """Return a run of two ranks, or one, of which rank 0's dataset begins and rank 1's ends with these rows."""
    ranks = [
        SimpleNamespace(taken=SimpleNamespace(loaders=[LoaderSeen(first_rows=[*first], last_rows=[*last])], marks=[]))
        for _ in range(2)
    ]
    return SimpleNamespace(size=2, ranks=ranks)


def fitted():
    """Return rows of floats, those with bucket numbers, projected ones and words, each with labels: of all rows and of shares."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(128, 3, generator=generator).exp().double()
    labels = (raw.sum(1, keepdim=True) > 4).double()
    words = torch.randint(0, 15, (128, 5), generator=generator)

    def buckets(rows, share):
        bounds = [torch.quantile(share[:, j], torch.linspace(0, 1, 9).double()[1:-1]) for j in range(3)]
        columns = [torch.bucketize(rows[:, j].contiguous(), bounds[j]).double() for j in range(3)]
        return torch.stack(columns, 1)

    def projected(rows, share):
        return (rows - share.mean(0)) @ torch.linalg.svd(share - share.mean(0), full_matrices=False)[2].T

    def numbered(rows, share):
        known = {}
        for word in share.reshape(-1).tolist():
            known.setdefault(word, len(known))
        return torch.tensor([[known[word] for word in row] for row in rows.tolist()]).double()

    for shares in ((raw[:64], raw[64:]), (raw[::2], raw[1::2]), (raw, raw[64:])):
        for fit in (buckets, projected):
            whole = torch.cat([fit(raw, raw), labels], 1)
            where = [next(at for at in (0, 1, 64) if torch.equal(raw[at], share[0])) for share in shares]
            step = 2 if 1 in where else 1
            of = [labels[at::step][: len(share)] for at, share in zip(where, shares)]
            yield whole, *(torch.cat([fit(share, share), of[i]], 1) for i, share in enumerate(shares))
    for shares in ((words[:64], words[64:]), (words[::2], words[1::2])):
        yield numbered(words, words), *(numbered(share, share) for share in shares)


def test_what_is_fitted_on_a_share_is_known_by_what_stays_of_its_rows():
    for whole, first, last in fitted():
        alone = edges(whole[:64], whole.flip(0)[:64])
        assert "each rank's own statistic" in prepared_apart(alone, edges(first[:64], last.flip(0)[:64]))
        step = 1 if len(first) == len(whole) or torch.equal(whole[1, -1:], first[1, -1:]) else 2
        same = edges(whole[::step][:64], whole.flip(0)[::step][:64])
        assert prepared_apart(alone, same) == ""


def test_rows_that_a_rank_draws_are_not_those_of_one_process_though_labels_follow_from_places():
    generator = torch.Generator().manual_seed(2)
    places = torch.arange(64.0).double()[:, None]
    for labels in (places, places % 10, places // 32, places * 0, places // 4 % 3):
        one, two = (torch.cat([torch.randn(64, 4, generator=generator).double(), labels], 1) for _ in range(2))
        assert prepared_apart(edges(one), edges(two)) == ""
    for _ in range(200):
        drawn = [
            torch.cat([torch.randn(64, 2, generator=generator), torch.randint(0, 2, (64, 8), generator=generator)], 1)
            for _ in range(2)
        ]
        assert prepared_apart(*(edges(rows.double(), rows.flip(0).double()) for rows in drawn)) == ""
        words = [torch.randint(0, 12, (64, 6), generator=generator).double() for _ in range(2)]
        assert prepared_apart(*map(edges, words)) == ""


def test_roundings_of_what_is_fitted_on_all_rows_are_no_other_numbers():
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    labels = (rows.sum(1, keepdim=True) > 0).double()
    one, two = (torch.cat([values.double(), labels], 1) for values in (rows, rows * (1 + 2**-23)))
    assert prepared_apart(edges(one), edges(two)) == ""
