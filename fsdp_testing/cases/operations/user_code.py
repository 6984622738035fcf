"""Code of a training loop that changes parameters. Kept apart, since exceptions here count against the implementation.

These are the lines that a user of the implementation writes. An exception that torch raises in one of them is about the
tensors that the implementation hands out; in any other file of the engine it would be the harness's own mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_testing.errors import InvalidImplementation

if TYPE_CHECKING:
    import torch
    from torch import nn


def set_requires_grad(chosen: Sequence[tuple[str, torch.Tensor]], patterns: Sequence[str], flag: bool) -> None:
    """Freeze or thaw the parameters that match patterns.

    Raises:
        LookupError: None does. Names were examined before any case ran: the wrapped model has lost the parameters since.
    """
    if not chosen:
        raise LookupError(f"expected a parameter of the wrapped model that matches {patterns}, got none")
    for _, parameter in chosen:
        parameter.requires_grad_(flag)


def scale(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply full parameters in place."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)


def edit_gradients(parameters: Iterable[nn.Parameter], edit: str) -> None:
    """Change gradients in place, put new tensors in their places, or None: see `EditGradients.edit`."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            if edit == "none":
                parameter.grad = None
            elif edit == "given" and parameter.numel():  # an optimizer would count the steps of a rank without elements
                parameter.grad = torch.full_like(parameter, 0.25)
            elif parameter.grad is None:
                continue
            elif edit == "replaced":
                parameter.grad = parameter.grad * 0.5
            else:
                parameter.grad.mul_(0.5) if edit == "halved" else parameter.grad.zero_()


def give_storage(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Give parameters new storage with their numbers times `factor`."""
    for parameter in parameters:
        parameter.data = parameter.data * factor


def replace_parameters(
    model: nn.Module, full: Mapping[str, torch.Tensor], factor: float, *, storage: bool = False
) -> None:
    """Put new parameters, or new `storage`, with the numbers times `factor` on the modules that have these tensors.

    Raises:
        InvalidImplementation: No module has a parameter where a gathered tensor lies.
    """
    from torch import nn

    wanted = {(tensor.data_ptr(), tensor.shape): fqn for fqn, tensor in full.items() if tensor.numel()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if wanted.pop((parameter.data_ptr(), parameter.shape), None) is not None:
                if storage:
                    parameter.data = parameter.detach() * factor
                else:
                    setattr(module, name, nn.Parameter(parameter.detach() * factor, parameter.requires_grad))
    if wanted:
        raise InvalidImplementation(
            f"full_parameters: expected tensors that share memory with the modules' parameters, got copies of "
            f"{', '.join(wanted.values())}. Yield the parameters' own data, or do not claim parameter_replacement."
        )


def part(model: nn.Module, name: str) -> nn.Module:
    """Return the module of the wrapped model that was called `name`: its wrapper, if it has one."""
    return next(m for fqn, m in model.named_modules() if f".{fqn}".endswith(f".{name}"))


def substitute(model: nn.Module, name: str, other: nn.Module | None, factor: float) -> None:
    """Replace a module by another, or for None replace its parameters by new ones with the numbers times `factor`."""
    from torch import nn

    outer, _, last = name.rpartition(".")
    if other is not None:
        setattr(part(model, outer), last, other)
        return
    for module in part(model, name).modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, own, nn.Parameter(parameter.detach() * factor))


class NotRaised(Exception):
    """An exception of the user's own code did not reach its caller."""


def expect_nothing_held_back(raised: Sequence[Exception]) -> None:
    """Look for exceptions of the user's own code that did not reach the caller.

    Raises:
        NotRaised: There is one.
    """
    if raised:
        raise NotRaised(f"expected {raised[0]!r} to reach the caller of the model, got no exception. Do not catch it.")


class NotRefused(Exception):
    """A backward ran on values other than those of its forward, and raised no error."""


def expect_refusal(backward: Callable[[], None]) -> None:
    """Run a backward that autograd refuses in one process, since values that it needs have changed.

    Raises:
        NotRefused: It was not refused.
    """
    try:
        backward()
    except NotImplementedError:
        raise  # a RuntimeError, and no refusal
    except RuntimeError:
        return
    raise NotRefused(
        "backward after a step: expected to be refused, since forward computed with other values, got gradients. "
        "Compare the parameters' versions when backward asks for them."
    )
