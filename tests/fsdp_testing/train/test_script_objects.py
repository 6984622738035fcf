"""Batches of objects whose classes the script defines, which no other process can import."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool.outcome import ErrorRecord, Fate, RankOutcome, WorldOutcome
from fsdp_testing.train.batches import joined, on_cpu, row_digests, tensors_in
from fsdp_testing.train.running import Undecided
from fsdp_testing.train.script import Launch, examine
from fsdp_testing.train.script_objects import ScriptObject, unpacked

SCRIPT = str(Path(__file__).parent / "with_objects.py")


@pytest.mark.parametrize("data", ["loader", "forward", "marked"])
@pytest.mark.parametrize("batch", ["dataclass", "slotted", "named", "plain", "slots", "items"])
def test_batches_of_a_scripts_own_classes_are_compared(batch, data):
    launch = Launch(SCRIPT, ("--batch", batch, "--data", data), isolation="warm")
    judgements = examine(launch, (2, 3)).judgements
    assert [each.verdict for each in judgements] == [Verdict.PASS] * 2, "\n".join(map(str, judgements))
    assert all("36 rows of data" in " ".join(each.compared) for each in judgements)


@pytest.mark.parametrize("data", ["forward", "marked"])
def test_objects_in_objects_are_compared(data):
    launch = Launch(SCRIPT, ("--batch", "nested", "--data", data), isolation="warm")
    judgements = examine(launch, (2, 3)).judgements
    assert [each.verdict for each in judgements] == [Verdict.PASS] * 2, "\n".join(map(str, judgements))
    assert all("36 rows of data" in " ".join(each.compared) for each in judgements)


@pytest.mark.parametrize("data", ["loader", "forward"])
def test_tensors_of_a_scripts_own_class_are_compared(data):
    launch = Launch(SCRIPT, ("--tagged", "--data", data), isolation="warm")
    (judgement,) = examine(launch, (2,)).judgements
    assert judgement.verdict is Verdict.PASS, judgement


@pytest.mark.parametrize("data", ["loader", "forward", "marked"])
@pytest.mark.parametrize("batch", ["slotted", "plain"])
def test_a_mistake_beside_such_batches_is_found(batch, data):
    launch = Launch(SCRIPT, ("--batch", batch, "--data", data, "--wrong"), isolation="warm")
    (judgement,) = examine(launch, (2,)).judgements
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "sum over ranks" in str(judgement) or "2 times" in str(judgement)


def test_a_report_that_cannot_be_sent_is_unknown_and_no_failure():
    error = ErrorRecord("TypeError", "run_here returned a RankReport that cannot be sent to the controller (...)", "")
    ranks = tuple(RankOutcome(rank, Fate.RAISED, error=error) for rank in (0, 1))
    ending = Launch(SCRIPT).ending(WorldOutcome("a script", 2, "gloo", ranks, None))
    assert isinstance(ending, Undecided), ending
    assert "cannot be compared: run_here returned" in str(ending)


Named = namedtuple("Named", ("x", "label"))


@dataclass
class Elsewhere:
    x: torch.Tensor
    label: str = ""


def local_class():
    @dataclass
    class Local:
        x: torch.Tensor

    return Local


def test_objects_of_importable_classes_keep_their_type_and_are_joined():
    parts = [Elsewhere(torch.full((2, 3), float(rank)), f"rank {rank}") for rank in range(2)]
    whole = joined([on_cpu(part) for part in parts])
    assert isinstance(whole, Elsewhere)
    assert whole.x.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert whole.label == "rank 0"
    assert parts[0].x.shape == (2, 3)
    assert isinstance(joined([on_cpu(Named(part.x, "")) for part in parts]), Named)


def test_an_object_of_a_local_class_is_sent_and_made_again_from_what_is_there():
    local = local_class()
    sent = on_cpu({"batch": [local(torch.ones(2, 3)), lambda: 1]})
    again = pickle.loads(pickle.dumps(sent))
    assert isinstance(again["batch"][0], ScriptObject)
    assert row_digests(again) == row_digests(local(torch.ones(2, 3)))
    own = {"batch": [local(torch.zeros(1, 3)), print]}
    with pytest.raises(InvalidArgument, match=r"got .*<lambda>.*top level of the script"):
        unpacked(again, own)
    made = unpacked(again["batch"][0], own["batch"][0])
    assert isinstance(made, local)
    assert made.x.tolist() == [[1.0] * 3] * 2
    assert own["batch"][0].x.tolist() == [[0.0] * 3]


class Closed:
    """Refuses to be pickled."""

    def __reduce__(self):
        raise TypeError("stays here")


def test_an_object_that_cannot_be_pickled_is_that_of_the_receiver():
    sent = pickle.loads(pickle.dumps(on_cpu((torch.ones(2), Closed()))))
    own = Closed()
    assert unpacked(sent, (torch.zeros(1), own))[1] is own
    with pytest.raises(InvalidArgument, match="got Closed of .*test_script_objects"):
        unpacked(sent)


def test_containers_keep_their_types_and_what_is_in_them_is_made_again():
    local = local_class()

    class Rows(list):
        pass

    sent = pickle.loads(pickle.dumps(on_cpu(OrderedDict(batch=local(torch.ones(2, 3)), rows=Rows([torch.ones(2)])))))
    own = OrderedDict(batch=local(torch.zeros(1, 3)), rows=Rows())
    made = unpacked(sent, own)
    assert type(made) is OrderedDict
    assert isinstance(made["batch"], local)
    assert [row.tolist() for row in made["rows"]] == [[1.0, 1.0]]


def test_an_object_that_holds_a_model_is_no_data():
    class Trainer:
        def __init__(self):
            self.model, self.mean = torch.nn.Linear(2, 2), torch.ones(3)

    trainer = Trainer()
    sent = on_cpu([torch.ones(4, 2), trainer])
    assert sent[1] == ScriptObject(Trainer.__module__, Trainer.__qualname__)
    assert unpacked(sent, [torch.zeros(1), trainer])[1] is trainer
    assert [tuple(tensor.shape) for tensor in tensors_in([torch.ones(4, 2), trainer])] == [(4, 2)]


def test_tensors_of_other_objects_are_not_rows():
    assert tensors_in(torch.nn.Linear(2, 2)) == []
    assert tensors_in([torch.nn.Linear(2, 2), {"x": Elsewhere(torch.ones(1))}])[0].tolist() == [1.0]
