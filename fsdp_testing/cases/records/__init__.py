"""Values that all rooms exchange: cases, observations, verdicts, findings, reports. Standard library only."""

from fsdp_testing.cases.operations import (
    OPERATIONS,
    AssignData,
    Batch,
    BuildOptimizer,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Interrupt,
    Move,
    Observe,
    Operation,
    Reload,
    ReplaceParameters,
    SetLr,
    SeveralForwards,
    Step,
    Thaw,
    UnshardFirst,
    ZeroGrad,
)
from fsdp_testing.cases.records.axes import AXES
from fsdp_testing.cases.records.capabilities import CAPABILITIES, check_capabilities
from fsdp_testing.cases.records.case import Case, check_case
from fsdp_testing.cases.records.event import (
    AutogradEvent,
    CollectiveEvent,
    Event,
    History,
    OperationEvent,
    UnitEvent,
    WaitEvent,
)
from fsdp_testing.cases.records.finding import (
    NOTHING_COMPARED,
    ExpectedFailure,
    Explanation,
    Finding,
    Judgement,
    Measure,
    Overrun,
    Tally,
    opening,
)
from fsdp_testing.cases.records.observation import (
    OUTLIVES,
    PARAMETERS_OUTLIVE,
    BufferObservation,
    CaseRecord,
    ObservedPiece,
    OperationAccount,
    OperationResult,
    OptimizerObservation,
    ParameterObservation,
    RaisedError,
    RankObservation,
    Snapshot,
)
from fsdp_testing.cases.records.outcome import CaseOutcome, CheckResult, Request, RunReport
from fsdp_testing.cases.records.portrait import (
    HeldSpan,
    LiveBytes,
    Portrait,
    RankPortrait,
    Stretch,
    UnitPortrait,
)
from fsdp_testing.cases.records.schedule import PlannedOperation, plan
from fsdp_testing.cases.records.specs import (
    STRATEGIES,
    UNDERFLOW,
    UNIT_ROUNDOFF,
    MixedPrecisionSpec,
    ModelSpec,
    OptimizerSpec,
    PolicySpec,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.cases.records.verdict import (
    ENDS_RANKS,
    LOSES_RANKS,
    RAISES,
    FailureKind,
    Mismatch,
    Verdict,
    exit_code,
    merge,
)
